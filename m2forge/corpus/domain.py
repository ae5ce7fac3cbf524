"""Recognizes a document's domain where its source does not name one: by file suffix, else by marker words.

The rules are cheap and coarse, good enough to weight a mixed crawl. A source whose domain is known should name it.
"""

import numpy as np
import numpy.typing as npt

from m2forge.corpus.feature import Feature, FeatureArray
from m2forge.corpus.source import CODE_SUFFIXES


def domain_of_name(name: str) -> str | None:
    """The domain implied by a file name; None if none is."""
    suffix = name[name.rfind(".") :].lower() if "." in name else ""
    return "code" if suffix in CODE_SUFFIXES else None


def recognise(features: FeatureArray) -> npt.NDArray[np.str_]:
    """The domain of each document: that of the first matching rule, else web."""
    words = np.maximum(features[:, Feature.WORDS], 1.0)

    def rate(feature: Feature) -> FeatureArray:
        return features[:, feature] / words

    num_bytes = np.maximum(features[:, Feature.NUM_BYTES], 1.0)
    symbols = features[:, Feature.SYMBOLS] / num_bytes
    rules = (
        ("code", (symbols > 0.06) & (rate(Feature.CODE) > 0.03) | (symbols > 0.1) & (rate(Feature.CODE) > 0.01)),
        ("qa", (features[:, Feature.QA] >= 4) & (rate(Feature.QA) > 0.06) & (rate(Feature.STOP) < 0.35)),
        ("maths", (features[:, Feature.MATHS] >= 3) & (rate(Feature.MATHS) > 0.012)),
        ("academic", (features[:, Feature.ACADEMIC] >= 4) & (rate(Feature.ACADEMIC) > 0.008)),
        ("books", (features[:, Feature.BOOKS] >= 3) & (features[:, Feature.WORDS] > 5000)),
    )
    return np.select([holds for _, holds in rules], [name for name, _ in rules], "web")

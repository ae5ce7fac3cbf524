"""A process that a restart would not help."""

import sys

from m2forge.cluster.launcher import end_with_error
from m2forge.errors import ConfigError

end_with_error(ConfigError(sys.argv[1]))

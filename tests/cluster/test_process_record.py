"""What a process record says of a server that moves."""

import json
from pathlib import Path

import pytest

from m2forge.cluster import process_record
from m2forge.cluster.process_record import ProcessRecord, RoleUrl, read_histories, record_path
from m2forge.errors import EngineError


def test_the_url_of_a_role_is_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_record, "FRESH_S", 0.0)
    find_url = RoleUrl(tmp_path, "gateway")
    with pytest.raises(EngineError, match="the gateway process was never placed"):
        find_url()
    first, second = ProcessRecord(tmp_path, "gateway", "n1"), ProcessRecord(tmp_path, "gateway", "n2")
    first.place("http://10.0.0.1:1")
    first.start()
    assert find_url() == "http://10.0.0.1:1"
    second.place("http://10.0.0.2:2")
    with record_path(tmp_path, "gateway").open("a") as file:
        file.write(json.dumps({"event": "placed", "url": "http://half.written"}))
    assert find_url() == "http://10.0.0.2:2"
    (history,) = read_histories(tmp_path)
    assert (history.node, history.num_starts, history.is_running) == ("n2", 1, False)

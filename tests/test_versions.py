# SPDX-License-Identifier: Apache-2.0
"""Which versions are taken, which belong together, and which are refused."""

import pytest
import validate_constraints
from cudagraphs import versions
from cudagraphs.versions import VersionError, resolve


@pytest.mark.parametrize("bridge", ["0.2", "0.8", "1.0", "9.9"])
def test_a_bridge_outside_the_rules_is_refused(bridge):
    for framework in ("megatron-bridge", "megatron-lm"):
        with pytest.raises(VersionError, match=rf"Megatron Bridge {bridge} is outside what the rules cover \(0.3 to 0.6\)"):
            resolve(framework, bridge=bridge)


@pytest.mark.parametrize("bridge", ["0.3", "0.6.2", "0.7"])
def test_a_bridge_that_the_rules_cover(bridge):
    assert resolve(bridge=bridge).bridge == versions.parse(bridge)


def test_an_installed_bridge_counts_only_where_it_is_used(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda component: "9.9" if component == "bridge" else None)
    with pytest.raises(VersionError, match="Bridge 9.9"):
        resolve()
    assert resolve("megatron-lm").bridge is None
    assert resolve(mcore="0.18").bridge == (0, 5)  # a given megatron-core brings the Bridge that goes with it


def test_the_bridge_that_goes_with_a_megatron_core_is_the_one_that_pins_it():
    for bridge, pin in versions.BRIDGE_PINS.items():
        assert resolve(mcore=pin).bridge == bridge
    assert resolve(mcore="0.20").bridge == (0, 7)
    assert "bridge 0.7 (goes with megatron-core 0.20)" in resolve(mcore="0.20").describe("megatron-bridge")


def test_one_line_on_the_command_line(capsys, tmp_path):
    path = tmp_path / "train.sh"
    path.write_text("torchrun pretrain_gpt.py --num-layers 2\n")
    assert validate_constraints.main([str(path), "--bridge", "9.9"]) == 2
    out = capsys.readouterr()
    assert out.out == "" and out.err.count("\n") == 1 and "Megatron Bridge 9.9 is outside" in out.err


def test_a_cudnn_number_is_written_as_its_release():
    # cudnn_version.h: CUDNN_MAJOR * 10000 + CUDNN_MINOR * 100 + CUDNN_PATCHLEVEL; times 1000 up to cuDNN 8
    assert [versions.dotted_cudnn(number) for number in (91900, "91900", 8907, 90101)] == ["9.19.0", "9.19.0", "8.9.7", "9.1.1"]
    assert versions.dotted_cudnn("9.14.0 (torch was built with 9.19.0)") == "9.14.0 (torch was built with 9.19.0)"
    assert versions.dotted_cudnn(None) is None

# SPDX-License-Identifier: Apache-2.0
"""Taking a part of the skill away makes the cases fail that rest on it, and no others."""

import ablation
import cases
import pytest

# part, a case that fails without it, a case that does not
TABLE = [
    ("rule CG106", "fp8-router-padding", "dense-pretrain"),
    ("template torchrun_launch.sh.j2", "launch-script-new", "dense-pretrain"),
    ("SKILL.md section Instructions", "smoke-neutral", "dense-pretrain"),
]


@pytest.mark.wheels
@pytest.mark.parametrize("part, fails, stays", TABLE, ids=[row[0] for row in TABLE])
def test_a_part_matters(part, fails, stays, upstream):
    chosen = [case for name in (fails, stays) if name for case in cases.load(name)]
    table, broken = ablation.run([part], chosen, 1, upstream, lambda line: None)
    assert not broken
    assert table == {part: [fails]}


def test_every_part_can_be_taken_away(skill, tmp_path):
    import shutil

    for number, (name, ablate) in enumerate(ablation.parts().items()):
        tree = tmp_path / str(number)
        shutil.copytree(skill, tree)
        ablate(tree)
        whole = {path.relative_to(skill): path.read_bytes() for path in skill.rglob("*") if path.is_file()}
        left = {path.relative_to(tree): path.read_bytes() for path in tree.rglob("*") if path.is_file()}
        assert whole != left, name


def test_an_unknown_section_is_refused(skill):
    with pytest.raises(ValueError, match="no section"):
        ablation.without_section("Nothing of the kind")(skill)

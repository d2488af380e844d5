# SPDX-License-Identifier: Apache-2.0
"""The archives: deterministic, complete, safe to unpack, and tampering is noticed."""

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import package_skill
import pytest

ROOT = Path(__file__).resolve().parents[1]


def tar_gz(entries):
    """A tar.gz of (TarInfo-like keyword arguments, data)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for fields, data in entries:
            info = tarfile.TarInfo(fields["name"])
            for key, value in fields.items():
                setattr(info, key, value)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


@pytest.fixture(scope="module")
def files():
    return package_skill.install_files()


def test_same_tree_gives_the_same_bytes(files):
    assert package_skill.archive(files) == package_skill.archive(dict(reversed(list(files.items()))))


def test_install_archive_leaves_the_answers_out(files):
    assert not [path for path in files if path.startswith(("evals/", "tests/")) or "__pycache__" in path]
    assert {"SKILL.md", "card.yaml", "LICENSE", "skill-card.md", "SHA256SUMS", "helpers/apply_overrides.py"} <= set(files)


def test_round_trip(files, tmp_path):
    target = package_skill.unpack(package_skill.archive(files), tmp_path)
    assert target.name == "nemo-cuda-graphs"
    assert {str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()} == set(files)


def test_an_older_copy_is_replaced_whole(files, tmp_path):
    content = {path: data for path, data in files.items() if path != "SHA256SUMS"}
    older = package_skill.with_sums({**content, "stale.md": b"old"})
    target = package_skill.unpack(package_skill.archive(older), tmp_path)
    package_skill.unpack(package_skill.archive(files), tmp_path)
    assert not (target / "stale.md").exists()


@pytest.mark.parametrize("change", ["edited", "added"])
def test_what_the_user_changed_in_an_installed_copy_is_not_lost(change, files, tmp_path):
    target = package_skill.unpack(package_skill.archive(files), tmp_path)
    mine = target / ("SKILL.md" if change == "edited" else "notes.md")
    mine.write_text("mine")
    with pytest.raises(package_skill.Refused, match="was changed since it was installed"):
        package_skill.unpack(package_skill.archive(files), tmp_path)
    assert mine.read_text() == "mine"
    package_skill.unpack(package_skill.archive(files), tmp_path, force=True)
    assert (target / "SKILL.md").read_bytes() == files["SKILL.md"]


def test_what_is_not_the_skill_is_never_replaced(files, tmp_path):
    (tmp_path / "nemo-cuda-graphs").mkdir()
    (tmp_path / "nemo-cuda-graphs" / "mine.txt").write_text("precious")
    with pytest.raises(package_skill.Refused, match="is not this skill"):
        package_skill.unpack(package_skill.archive(files), tmp_path)
    assert (tmp_path / "nemo-cuda-graphs" / "mine.txt").read_text() == "precious"


TRICKS = {
    "parent folder": {"name": "nemo-cuda-graphs/../../evil"},
    "absolute path": {"name": "/tmp/evil"},
    "another top folder": {"name": "other/SKILL.md"},
    "symbolic link": {"name": "nemo-cuda-graphs/link", "type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
    "hard link": {"name": "nemo-cuda-graphs/link", "type": tarfile.LNKTYPE, "linkname": "nemo-cuda-graphs/SKILL.md"},
    "device": {"name": "nemo-cuda-graphs/null", "type": tarfile.CHRTYPE},
    "backslashes": {"name": "nemo-cuda-graphs/..\\evil"},
}


@pytest.mark.parametrize("trick", TRICKS)
def test_path_tricks_are_refused(trick, tmp_path):
    with pytest.raises(package_skill.Refused):
        package_skill.unpack(tar_gz([(TRICKS[trick], b"")]), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_twice_the_same_path_is_refused(tmp_path):
    entry = ({"name": "nemo-cuda-graphs/SKILL.md"}, b"a")
    with pytest.raises(package_skill.Refused, match="twice"):
        package_skill.unpack(tar_gz([entry, entry]), tmp_path)


SKILL = ({"name": "nemo-cuda-graphs/SKILL.md"}, b"a")
UNUSABLE = {
    "a dot": [({"name": "."}, b""), SKILL],
    "a file that is a folder too": [SKILL, ({"name": "nemo-cuda-graphs/a"}, b""), ({"name": "nemo-cuda-graphs/a/b"}, b"")],
    "a name too long": [SKILL, ({"name": f"nemo-cuda-graphs/{'x' * 256}"}, b"")],
    "a path too long": [SKILL, ({"name": "nemo-cuda-graphs/" + "x/" * 600 + "y"}, b"")],
    "no SKILL.md": [({"name": "nemo-cuda-graphs/LICENSE"}, b"")],
    "nothing": [],
}


@pytest.mark.parametrize("how", ["--verify", "--unpack"])
@pytest.mark.parametrize("entries", UNUSABLE.values(), ids=UNUSABLE)
def test_what_cannot_be_unpacked_is_refused_with_one_line(how, entries, tmp_path, capsys):
    sums = {fields["name"].partition("/")[2]: data for fields, data in entries}
    listed = package_skill.with_sums(sums)[package_skill.SUMS]
    path, into = tmp_path / "a.tar.gz", tmp_path / "into"
    path.write_bytes(tar_gz([*entries, ({"name": "nemo-cuda-graphs/SHA256SUMS"}, listed)]))
    assert package_skill.main([how, str(path), *(["--into", str(into)] if how == "--unpack" else [])]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1 and not into.exists()


@pytest.mark.parametrize("change", ["changed", "missing", "added"])
def test_tampering_is_noticed(change, files, tmp_path):
    tampered = dict(files)
    if change == "changed":
        tampered["SKILL.md"] += b" "
    elif change == "missing":
        del tampered["LICENSE"]
    else:
        tampered["helpers/extra.py"] = b"print()"
    with pytest.raises(package_skill.Refused, match="differs from"):
        package_skill.unpack(package_skill.archive(tampered), tmp_path)


@pytest.mark.parametrize("data", [b"", b"not an archive", b"\x1f\x8b\x08\x00broken"])
def test_what_is_no_archive_is_refused(data, tmp_path, capsys):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(data)
    assert package_skill.main(["--verify", str(path)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_truncated_archive_is_refused(files, tmp_path):
    with pytest.raises(package_skill.Refused):
        package_skill.unpack(package_skill.archive(files)[:-200], tmp_path)


def test_command_line_builds_verifies_and_installs(tmp_path, capsys):
    assert package_skill.main(["--output", str(tmp_path / "dist"), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["written"]
    assert len(written) == 3
    assert package_skill.main(["--verify", written[0]]) == 0
    project = tmp_path / "project"
    project.mkdir()
    assert package_skill.main(["--install", str(project)]) == 0
    assert package_skill.main(["--install", str(project), "--client", "claude"]) == 0
    for folder in (".agents", ".claude"):
        assert (project / folder / "skills" / "nemo-cuda-graphs" / "SKILL.md").is_file()


def test_usage_errors(tmp_path, capsys):
    assert package_skill.main(["--install", str(tmp_path / "nowhere")]) == 2
    assert package_skill.main(["--verify", str(tmp_path / "nowhere.tar.gz")]) == 2
    assert package_skill.main([]) == 2
    capsys.readouterr()


def test_installed_skill_works_read_only_from_anywhere_and_stays_clean(files, tmp_path):
    target = package_skill.unpack(package_skill.archive(files), tmp_path / "skills")
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    for path in [*target.rglob("*"), target]:
        path.chmod(path.stat().st_mode & ~0o222)
    work = tmp_path / "work"
    work.mkdir()
    for name in ("base.py", "recipe.py"):
        (work / name).write_bytes(files[f"templates/example_recipe/{name}"])
    done = subprocess.run(
        [sys.executable, str(target / "helpers" / "apply_overrides.py"), "recipe.py", "--mcore", "0.19"],
        cwd=work, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "cuda_graph_modules" in (work / "recipe.py").read_text()
    for path in [*target.rglob("*"), target]:
        path.chmod(path.stat().st_mode | 0o200)
    assert {path: path.read_bytes() for path in target.rglob("*") if path.is_file()} == before


def test_signature_detects_tampering(tmp_path):
    pytest.importorskip("model_signing", reason="the optional package model-signing is not installed")
    key, public = tmp_path / "key.pem", tmp_path / "public.pem"
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    key.write_bytes(
        private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public.write_bytes(
        private.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    assert package_skill.main(["--output", str(tmp_path / "dist"), "--sign", str(key)]) == 0
    (archive,) = [p for p in (tmp_path / "dist").glob("*.tar.gz") if "source" not in p.name]
    flags = ["--signature", f"{archive}.sig", "--public-key", str(public)]
    assert package_skill.main(["--verify", str(archive), *flags]) == 0
    changed = package_skill.members(archive.read_bytes())
    changed.pop("SHA256SUMS")
    changed["SKILL.md"] += b"one more byte"
    archive.write_bytes(package_skill.archive(package_skill.with_sums(changed)))
    assert package_skill.main(["--verify", str(archive), *flags]) == 1

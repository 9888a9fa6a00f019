"""A job is checked before it is launched, and not again once it has passed."""

import subprocess

import pytest

from bert_jax.pods.launch.job import LaunchError, check_job

# Adds a line to `log`, outside of the clone, and fails for a job that says so.
CHECK = """
import sys
with open("../log", "a") as file: print(sys.argv[1:], file=file)
sys.exit("--fail" in sys.argv)
"""


def commit(root):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["add", "."], [*identity, "commit", "--quiet", "--message=all"]):
        subprocess.run(["git", *words], cwd=root, check=True)


def test_job_that_passed_is_checked_again_only_if_something_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root, log = tmp_path / "clone", tmp_path / "log"
    (root / "tools").mkdir(parents=True)
    (root / "tools/launch_check.py").write_text(CHECK)
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    commit(root)

    def is_checked(num_devices=8, words=("pretrain", "--a=1")) -> bool:
        log.write_text("")
        check_job(root, num_slices=1, num_devices=num_devices, job=[*words])
        return bool(log.read_text())

    assert is_checked() and not is_checked()
    assert is_checked(num_devices=16) and is_checked(words=("pretrain", "--a=2"))
    for _ in range(2):
        with pytest.raises(LaunchError, match="the job would fail"):
            is_checked(words=("pretrain", "--fail"))
        assert log.read_text()
    (root / ".git/info/exclude").write_text("ignored.py")
    for text in ("a = 1", "a = 2"):
        (root / "ignored.py").write_text(text)
        words = ("pretrain", "--config=ignored.py:b")
        assert is_checked(words=words) and not is_checked(words=words)
    (root / "config.py").write_text("")
    assert is_checked() and is_checked()
    commit(root)
    assert is_checked() and not is_checked() and not is_checked()

"""The build step that puts the scripts into the wheel; all metadata is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

# What the `dschat` command runs and reads. In a wheel dschat/scripts stands for the root.
SCRIPTS = ("train.py", "chat.py", "step*/main.py", "training/*/*")


class BuildWithScripts(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # dschat/__main__.py finds them in the repository
            return
        for path in (path for pattern in SCRIPTS for path in Path().glob(pattern)):
            target = Path(self.build_lib, "dschat", "scripts", path)
            self.mkpath(str(target.parent))
            self.copy_file(str(path), str(target))


setup(cmdclass={"build_py": BuildWithScripts})

"""Puts the native decoder into the wheel, which is then one for this platform. Without a C++ compiler the wheel is pure.

All else is in pyproject.toml.
"""

import subprocess
import sys
import warnings
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.warnings import InformationOnly

sys.path.insert(0, str(Path(__file__).parent.absolute()))
from attend.model.net.native.build import build_library, find_compiler
from attend.model.net.native.library import library_name

# An editable install warns of folders named `attend` where Python is started: the command `attend` imports none of them.
warnings.simplefilter("ignore", InformationOnly)


class BuildWithDecoder(build_py):
    """Copies the package and compiles the native decoder beside its source. An editable install copies nothing."""

    def run(self) -> None:
        """What cannot be built is told: the wheel serves without it, and slower."""
        super().run()
        if self.editable_mode:
            return
        compiler = find_compiler()
        if compiler is None:
            print("no C++ compiler: this wheel has no native decoder; attend builds one at its first start", file=sys.stderr)
            return
        print("compiling the native decoder")
        try:
            build_library(compiler, Path(self.build_lib, "attend/model/net/native"))
        except subprocess.CalledProcessError as error:
            print(f"this wheel has no native decoder, which cannot be built: {error.stderr}", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """A wheel for every Python 3, and for one platform where it holds the native decoder."""

    def run(self) -> None:
        """Build first: what came of it decides."""
        self.run_command("build")
        self.skip_build = True
        folder = Path(self.get_finalized_command("build_py").build_lib)
        if (folder / "attend/model/net/native" / library_name()).is_file():
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True  # its install puts all of it into the wheel's root
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """py3-none and the platform: no part is bound to a version of Python."""
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildWithDecoder, "bdist_wheel": PlatformWheel})

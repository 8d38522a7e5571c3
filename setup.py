"""Builds csrc/ for whatever the installed torch supports; metadata and dependencies are in pyproject.toml."""

import hashlib
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from setuptools import setup


def has_cuda_toolkit(cpp_extension: ModuleType) -> bool:
    """Whether nvcc is there with its headers. torch goes by where nvcc is, which a wrapper on PATH makes wrong."""
    home = cpp_extension.CUDA_HOME
    if home is None:
        return False
    folders = [os.path.join(home, "include"), *cpp_extension.include_paths("cuda")]
    if any(Path(folder, "cuda_runtime.h").exists() for folder in folders):
        return True
    print(f"warning: the CUDA toolkit in {home} has no headers: kernels for the CPU alone are built; set CUDA_HOME")
    return False


def compiled_ahead(folder: Path) -> list[str]:
    """The objects that `make cuda-objects` left in ``folder``; ends the build unless they are of these sources."""
    sums = folder / "sources.sha256"
    if not sums.exists():
        sys.exit(f"error: no compiled kernels in ZEROPP_CUDA_OBJECTS={folder}: run `make cuda-objects` where nvcc is")
    # Not by their times, which a copy to the machine with the GPU does not keep.
    compiled = dict(reversed(line.split()) for line in sums.read_text().splitlines())
    sources = sorted(path for pattern in ("*.h", "cuda/*") for path in Path("csrc").glob(pattern))
    if compiled != {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sources}:
        sys.exit(f"error: {folder} was compiled from other sources than csrc/ holds: run `make cuda-objects` again")
    return [str(folder / path.with_suffix(".o").name) for path in sources if path.suffix == ".cu"]


def kernels() -> dict:
    """The arguments of setup() that build the operators; none when there is no torch to build against."""
    # pip hides the environment's packages from a build. A torch that the build brought itself would be another one than
    # that which is to load the extension, so look where this interpreter keeps its packages.
    sys.path += [sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
    try:
        import torch
        from torch.utils import cpp_extension
    except (ImportError, OSError) as error:  # OSError: a torch whose libraries do not load
        print(f"no torch to build against ({error}): the kernels of csrc/ are left out, and plain torch will quantize")
        return {}

    sources = ["csrc/operators.cpp", "csrc/cpu/kernels.cpp", "csrc/cpu/moves.cpp"]
    compile_args = {"cxx": ["-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-g0"]}
    if sys.platform == "linux":
        # at::parallel_for is OpenMP's, of the library that torch brings. A loop copies a tile faster than memcpy.
        compile_args["cxx"] += ["-fopenmp", "-fno-tree-loop-distribute-patterns"]
    macros: list = []
    objects: list[str] = []
    make_extension = cpp_extension.CppExtension
    is_for_cuda = torch.version.cuda is not None and has_cuda_toolkit(cpp_extension)
    if folder := os.environ.get("ZEROPP_CUDA_OBJECTS"):
        objects = compiled_ahead(Path(folder))
        if torch.version.cuda is None:
            sys.exit(f"error: ZEROPP_CUDA_OBJECTS is set, but torch {torch.__version__} is not for CUDA: unset it")
        if not is_for_cuda:
            sys.exit("error: ZEROPP_CUDA_OBJECTS is set, but no CUDA toolkit to link with was found: set CUDA_HOME")
    if is_for_cuda:
        if not objects:
            os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")  # PTX serves newer cards
            sources += sorted(map(str, Path("csrc/cuda").glob("*.cu")))
            compile_args["nvcc"] = ["-std=c++20", "-O3", "--fmad=false"]  # as in the Makefile
        macros.append(("ZEROPP_WITH_CUDA", None))
        make_extension = cpp_extension.CUDAExtension
    extension = make_extension(
        "megatron_zpp.zeropp.wire._kernels",
        sources,
        depends=[str(path) for path in Path("csrc").rglob("*.h")],
        define_macros=macros,
        extra_objects=objects,
        extra_compile_args=compile_args,
        extra_link_args=["-fopenmp"] if sys.platform == "linux" else [],
    )
    extension.optional = True  # installing goes on without the file that a failed build leaves out

    class BuildIfPossible(cpp_extension.BuildExtension.with_options(no_python_abi_suffix=True)):
        def build_extensions(self) -> None:
            try:
                super().build_extensions()
            # Torch raises RuntimeError, CalledProcessError and others, which setuptools' ``optional`` lets through.
            except Exception as error:
                reason = str(error).partition("\n")[0]
                print(f"warning: the kernels of csrc/ are left out, and plain torch will quantize: {reason}")
                for extension in self.extensions:  # what an earlier build left would be taken for this one's
                    Path(*extension.name.split(".")).with_suffix(".so").unlink(missing_ok=True)

    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildIfPossible}}


setup(**kernels())

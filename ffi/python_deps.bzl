"""Headers that live in a Python environment: CPython's own, jaxlib's (XLA FFI) and nanobind.

The interpreter is `python3` on PATH, or `--repo_env=PYTHON=/path/to/python`. It must have jaxlib and
nanobind installed, and runs the Python tests.
"""

_QUERY = """
import importlib.util, sys, sysconfig
print(sys.executable)
print(sysconfig.get_path("include"))
for name in ("jaxlib", "nanobind"):
    spec = importlib.util.find_spec(name)
    print(spec.submodule_search_locations[0] if spec else "")
"""

_BUILD = """
load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

cc_library(
    name = "python",
    hdrs = glob(["python/**/*.h"]),
    includes = ["python"],
)

cc_library(
    name = "xla_ffi",
    hdrs = glob(["jaxlib/xla/ffi/api/*.h"]),
    includes = ["jaxlib"],
)

cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"],
    hdrs = glob(["nanobind/include/**/*.h"]),
    copts = ["-fno-strict-aliasing", "-fvisibility=hidden"],
    includes = ["nanobind/include"],
    linkstatic = True,
    textual_hdrs = glob(
        ["nanobind/src/*.cpp", "nanobind/src/*.h", "nanobind/ext/robin_map/include/**/*.h"],
        exclude = ["nanobind/src/nb_combined.cpp"],
    ),
    deps = [":python", ":robin_map"],
)

cc_library(
    name = "robin_map",
    hdrs = glob(["nanobind/ext/robin_map/include/**/*.h"]),
    includes = ["nanobind/ext/robin_map/include"],
)
"""

def _python_deps_impl(ctx):
    python = ctx.os.environ.get("PYTHON") or ctx.which("python3")
    result = ctx.execute([python, "-c", _QUERY])
    if result.return_code != 0:
        fail("{} failed:\n{}".format(python, result.stderr))
    executable, include, jaxlib, nanobind = result.stdout.split("\n")[:4]
    if not jaxlib or not nanobind:
        fail(("{} lacks jaxlib or nanobind. Install them there (pip install jax nanobind) or " +
              "name another interpreter with --repo_env=PYTHON=...").format(executable))
    ctx.symlink(include, "python")
    ctx.symlink(jaxlib + "/include", "jaxlib")
    ctx.symlink(nanobind, "nanobind")
    ctx.file("BUILD.bazel", _BUILD)
    ctx.file("defs.bzl", "PYTHON = {}\n".format(repr(executable)))

python_deps = repository_rule(
    implementation = _python_deps_impl,
    environ = ["PYTHON", "PATH"],
    configure = True,
    local = True,
)

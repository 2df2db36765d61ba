"""python_deps for MODULE.bazel. A file of its own: Bazel before 6 does not know module_extension."""

load(":python_deps.bzl", "python_deps")

def _python_deps_extension_impl(_ctx):
    python_deps(name = "python_deps")

python_deps_extension = module_extension(implementation = _python_deps_extension_impl)

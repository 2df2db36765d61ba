"""pytest_test: runs pytest under the interpreter that @python_deps found."""

load("@python_deps//:defs.bzl", "PYTHON")

# PYTHONPATH puts the package of this build before any installed copy.
_SCRIPT = """#!/bin/sh
set -eu
root="$TEST_SRCDIR/$TEST_WORKSPACE"
cd "$root"
export HOME="$TEST_TMPDIR" PYTHONPATH="$root" PYTHONDONTWRITEBYTECODE=1
exec {python} -m pytest -p no:cacheprovider -c "$root/pyproject.toml" --rootdir="$root" {args} {files}
"""

def _pytest_test_impl(ctx):
    files = [f.short_path for f in ctx.files.srcs]
    script = ctx.actions.declare_file(ctx.label.name + ".sh")
    ctx.actions.write(
        script,
        _SCRIPT.format(python = PYTHON, args = " ".join(ctx.attr.pytest_args), files = " ".join(files)),
        is_executable = True,
    )
    runfiles = ctx.runfiles(files = ctx.files.srcs + ctx.files.data)
    return [DefaultInfo(executable = script, runfiles = runfiles)]

pytest_test = rule(
    implementation = _pytest_test_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = [".py"], mandatory = True),
        "data": attr.label_list(allow_files = True),
        "pytest_args": attr.string_list(),
    },
    test = True,
)

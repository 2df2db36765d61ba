"""cpu_kernels: one source, compiled once for each instruction set that the target may have."""

load("@rules_cc//cc:defs.bzl", "cc_library")

# Explained at the top of attention_cpu_kernels.cc; CMakeLists.txt holds the same for CMake.
_FLAGS = {
    "portable": [],
    "neon": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": [
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512dq",
        "-mfma",
        "-mprefer-vector-width=512",
    ],
}
_INSTRUCTION_SETS = {
    "@platforms//cpu:x86_64": ["portable", "avx2", "avx512"],
    "@platforms//cpu:aarch64": ["neon"],
    "//conditions:default": ["portable"],
}

def cpu_kernels(name, srcs, copts, deps):
    """A library of `srcs`, each compiled with -DJAX_FA_ISA=isa and the flags of that isa.

    Args:
      name: of the library.
      srcs: sources.
      copts: compiler options for every instruction set.
      deps: libraries with the headers of srcs.
    """
    for isa, flags in _FLAGS.items():
        cc_library(
            name = name + "_" + isa,
            srcs = srcs,
            copts = copts + ["-O3", "-ffp-contract=fast"] + flags,
            linkstatic = True,
            local_defines = ["JAX_FA_ISA=" + isa],
            tags = ["manual"],  # `//...` must not compile AVX on ARM
            deps = deps,
        )
    cc_library(
        name = name,
        deps = select({
            cpu: [":{}_{}".format(name, isa) for isa in isas]
            for cpu, isas in _INSTRUCTION_SETS.items()
        }),
    )

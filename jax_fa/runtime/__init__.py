"""The path of a call from its arguments to a custom call, on CPUs, GPUs and meshes of them.

In the order of calls; a module calls only modules below it (``tests/test_imports.py``)::

    api           the public functions
      eager         outside of jit: compiles all that follows as one program, once
      arguments     keywords to operands and semantics, by the converters of ``checks``
      strategies    only where explicit sharding splits tokens: the rest runs per device
      vjp           what the forward saves for the backward
        primitives    flat arrays; binds a primitive, and the call returns to JAX

JAX lowers the primitive, and calls back twice::

    primitives    asks ``bindings`` for the target and ``dispatch`` for the kernel
    partitioning  what one device computes
      bindings      scratch, attributes and the order of arrays (``spec/schema.py``): custom call

At run time XLA calls ``ffi/handlers_cpu.cc`` or ``handlers_cuda.cc``: ``arguments.cc`` reads the
call, ``kernel_table.cc`` finds the kernel by name, ``driver.cc`` launches it.
"""

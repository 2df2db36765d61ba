"""Runs compiled PTX on the CPU, thread for thread, and reports what hardware would hide.

    memory = Memory()
    address = memory.add("x", x)
    report = emulate(ptx_text, Launch(grid=(1, 1, 1), block=(128, 1, 1),
                                      params=(struct.pack("<Q", address),)), memory)

Faults are exceptions, see faults.py. How to add an instruction is described in registry.py.
"""

from jax_fa.emulator.faults import EmulationError as EmulationError
from jax_fa.emulator.launch import Launch as Launch
from jax_fa.emulator.machine import Options as Options
from jax_fa.emulator.memory import Memory as Memory
from jax_fa.emulator.report import Report as Report
from jax_fa.emulator.run import emulate as emulate

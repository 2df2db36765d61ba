// Straight runs of arithmetic on the 32 lanes of a warp: the compiled twin of the instructions that
// jax_fa/emulator/blocks.py lists. Both give the same bits (tests/emulator/test_blocks.py).
#ifndef JAX_FA_EMULATOR_BLOCK_H_
#define JAX_FA_EMULATOR_BLOCK_H_

#include <cstdint>
#include <string>
#include <vector>

namespace jax_fa {

constexpr int kWarpLanes = 32;

// One operation on values that lie, lane after lane, at byte offsets in a scratch memory.
struct BlockStep {
  int32_t operation;  // index in BlockOperations()
  int32_t to;
  // Offsets. Of loads: the address, how many rows of the result, what is added to the address.
  int32_t from[10];
};

// One CTA's shared memory, over the arrays of memory.py's SharedMemory.
struct SharedView {
  int64_t size;
  uint32_t base;  // what the addresses of its bytes begin with
  const char* data;
  const char* written;           // for every byte, 1 if something was stored there
  const uint16_t* chunk_writes;  // for every 16 bytes, the operations that may still write there
  const uint16_t* word_writes;   // for every 4 bytes

  // Loads `width` bytes from an offset, or gives false if that is a fault.
  bool Load(int64_t first, int64_t width, char* to) const;
};

// Names of the operations: what is done, then the kinds of values.py. "fma.f4" is one.
const std::vector<std::string>& BlockOperations();

// Runs the steps in order. False, and what is in `scratch` is of no use, if a load is a fault or
// does not read `shared`.
bool RunBlock(const std::vector<BlockStep>& steps, char* scratch, const SharedView* shared);

// Rows (first, slope, curve) and squares by which a special function interpolates, see mufu.py.
struct Interpolation {
  std::vector<int64_t> first, slope, curve;
  std::vector<uint16_t> square;
  int bits = 0;

  int64_t operator()(int64_t fraction) const {
    const int64_t row = fraction >> bits, x = fraction & ((int64_t{1} << bits) - 1);
    return first[row] + slope[row] * x + curve[row] * square[x];
  }
};

// Must be set before "ex2.f4", "lg2.f4" and "rcp.f4" run.
extern Interpolation ex2_table, lg2_table, rcp_table;

}  // namespace jax_fa

#endif  // JAX_FA_EMULATOR_BLOCK_H_

// Checks that a run of steps computes what it says; tests/emulator/test_blocks.py compares every
// operation with numpy's.
#include "emulator_block.h"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "testing.h"

namespace jax_fa {
namespace {

int Find(const std::string& name) {
  const std::vector<std::string>& names = BlockOperations();
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == name) return static_cast<int>(i);
  }
  Check(false, name.c_str());
  return 0;
}

// (a + b) * b, then its bits joined with themselves, then the high half of that.
void TestRun() {
  constexpr int kBytes = 4 * kWarpLanes;
  float a[kWarpLanes], b[kWarpLanes], found[kWarpLanes];
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    a[lane] = 0.5f * lane;
    b[lane] = 3.0f - lane;
  }
  std::vector<char> scratch(8 * kBytes);
  std::memcpy(scratch.data(), a, kBytes);
  std::memcpy(scratch.data() + kBytes, b, kBytes);
  RunBlock({{Find("add.f4"), 2 * kBytes, {0, kBytes, 0}},
            {Find("mul.f4"), 3 * kBytes, {2 * kBytes, kBytes, 0}},
            {Find("join.u4"), 4 * kBytes, {0, 3 * kBytes, 0}},
            {Find("high.u8"), 6 * kBytes, {4 * kBytes, 0, 0}}},
           scratch.data(), nullptr);
  std::memcpy(found, scratch.data() + 6 * kBytes, kBytes);
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    Check(found[lane] == (a[lane] + b[lane]) * b[lane], "a run of steps");
  }
}

}  // namespace
}  // namespace jax_fa

int main() {
  jax_fa::TestRun();
  std::printf("%s\n", jax_fa::failed == 0 ? "all passed" : "some failed");
  return jax_fa::failed != 0;
}

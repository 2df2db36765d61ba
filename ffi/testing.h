// What the tests of this folder share: failures are printed and counted.
#ifndef JAX_FA_TESTING_H_
#define JAX_FA_TESTING_H_

#include <cstdio>
#include <string>

namespace jax_fa {

inline int failed = 0;

inline void Check(bool ok, const std::string& what) {
  failed += !ok;
  if (!ok) std::printf("FAILED %s\n", what.c_str());
}

}  // namespace jax_fa

#endif  // JAX_FA_TESTING_H_

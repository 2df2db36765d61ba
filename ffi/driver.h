// The launch seam: the only implementer of the CUDA functions that compiled objects call.
//
// Driver mode forwards to libcuda.so.1, found at run time, so that this library loads on machines
// without CUDA. Record mode stores launches instead and needs no GPU. The mode belongs to a call,
// not to the process: recording in one thread leaves launches of another alone.
#ifndef JAX_FA_DRIVER_H_
#define JAX_FA_DRIVER_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

namespace jax_fa {

// Nothing, or what failed: the CUDA call, its code and its text.
using Failure = std::optional<std::string>;

// A kernel of a compiled object, with the sizes of its parameters, which the object does not tell.
struct KernelSignature {
  const char* name;
  const int32_t* param_bytes;
  int32_t num_params;
};

// The handle of a kernel that an object holds after loading.
struct KernelHandle {
  const KernelSignature* signature;
  void* kernel;  // CUkernel; null until loaded in driver mode
};

// The state kept for an object. Written under a lock, but for `devices`.
struct ObjectState {
  const void* image = nullptr;       // the device code in the object
  void* library = nullptr;           // CUlibrary; null until loaded in driver mode
  std::deque<KernelHandle> handles;  // addresses stay valid: the object keeps them
  bool is_linked = false;            // the object holds its handles
  std::atomic<uint64_t> devices{0};  // bit i: ready to launch on the device of ordinal i
};

// A compiled object: the functions that the exporter gives it, each taking an array of addresses.
struct Object {
  const char* name;                          // of the variant
  void (*init)(void** arguments);            // library, status
  void (*load_to_device)(void** arguments);  // library, device, status
  void (*call)(void** arguments, int32_t count);
  const KernelSignature* kernels;
  int32_t num_kernels;
  mutable ObjectState state = {};
};

// What kernel choice and launches depend on.
struct Device {
  int32_t capability;  // 10 * major + minor
  int32_t num_sms;
};

// The arguments of one call, in the order of the object's parameter list.
class Arguments {
 public:
  static constexpr int32_t kMax = 64;

  void Add(const void* pointer) { Next()->pointer = pointer; }
  void Add(int32_t value) { Next()->int32 = value; }
  void Add(float value) { Next()->float32 = value; }
  Arguments() = default;
  Arguments(const Arguments&) = delete;  // addresses_ points into slots_

 private:
  friend class Session;
  union Slot {
    const void* pointer;
    int32_t int32;
    float float32;
  };
  Slot* Next() {
    addresses_[count_] = &slots_[count_];
    return &slots_[count_++];
  }
  Slot slots_[kMax];
  void* addresses_[kMax + 1];  // one more for the status that the object writes
  int32_t count_ = 0;
};

// One kernel launch, as record mode stores it.
struct Launch {
  std::string kernel;
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t cluster[3];
  uint64_t shared_bytes;  // dynamic
  bool is_cooperative;
  bool is_programmatic;             // may start before the previous kernel ends
  std::vector<std::string> params;  // raw bytes; padding inside them is arbitrary
};

// The device of `ordinal`, which `stream` belongs to; asks CUDA the first time.
Failure QueryDevice(int32_t ordinal, void* stream, Device* device);

// Makes `object` ready on that device, so that no launch loads anything; cheap when it is.
Failure Load(const Object& object, int32_t ordinal, void* stream);

// Launches; the object must have been loaded on that device.
Failure Call(const Object& object, int32_t ordinal, Arguments* arguments);

// What Call would launch on a device with `num_sms` multiprocessors.
inline constexpr int32_t kRecordedSharedBytes = 227 * 1024;  // per block, for objects that ask
Failure Record(const Object& object, int32_t num_sms, Arguments* arguments,
               std::vector<Launch>* launches);

}  // namespace jax_fa

#endif  // JAX_FA_DRIVER_H_

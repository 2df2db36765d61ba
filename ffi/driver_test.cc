// Checks record mode, and driver mode where there is no driver or GPU, with an object written by
// hand that makes the calls an exported one makes.
#include "driver.h"

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "testing.h"

extern "C" {
int32_t _cudaLibraryLoadData(void**, const void*, void*, void**, uint32_t, void*, void**, uint32_t);
int32_t _cudaLibraryGetKernel(void**, void*, const char*);
int32_t _cudaDeviceGetAttribute(int32_t*, int32_t, int32_t);
int32_t _cuKernelGetAttribute(int32_t*, int32_t, void*, int32_t);
int32_t _cudaKernelSetAttributeForDevice(void*, int32_t, int32_t, int32_t);
int32_t _cudaLaunchKernelEx(const void*, void*, void**);
}

namespace jax_fa {
namespace {

// ---- The object: two kernels, launched one after the other --------------------------------------

struct Attribute {
  int32_t id;
  int32_t padding;
  int32_t value[16];
};

struct Config {
  uint32_t grid[3];
  uint32_t block[3];
  uint64_t shared_bytes;
  void* stream;
  Attribute* attributes;
  uint32_t num_attributes;
};

constexpr char kImage[] = "device code";
int num_inits = 0;
void* kernels[2];

void Init(void** arguments) {
  auto** library = *static_cast<void***>(arguments[0]);
  ++num_inits;
  *static_cast<int32_t*>(arguments[1]) =
      _cudaLibraryLoadData(library, kImage, nullptr, nullptr, 0, nullptr, nullptr, 0);
}

void LoadToDevice(void** arguments) {
  void* library = **static_cast<void***>(arguments[0]);
  const int32_t device = *static_cast<int32_t*>(arguments[1]);
  int32_t* status = static_cast<int32_t*>(arguments[2]);
  const char* const names[] = {"first", "second"};
  for (int i = 0; i < 2; ++i) {
    int32_t limit = 0, used = 0;
    if ((*status = _cudaDeviceGetAttribute(&limit, 97, device))) return;
    if ((*status = _cudaLibraryGetKernel(&kernels[i], library, names[i]))) return;
    if ((*status = _cuKernelGetAttribute(&used, 1, kernels[i], device))) return;
    if ((*status = _cudaKernelSetAttributeForDevice(kernels[i], 8, limit - used, device))) return;
  }
}

// Parameters: a pointer, an int32, the stream.
void CallObject(void** arguments, int32_t count) {
  int32_t* status = static_cast<int32_t*>(arguments[count - 1]);
  Attribute attributes[2] = {{4, 0, {2, 1, 1}}, {6, 0, {1}}};
  Config config = {{8, 2, 1}, {384, 1, 1}, 200000, *static_cast<void**>(arguments[2]), attributes,
                   2};
  void* params[] = {arguments[0], arguments[1]};
  if ((*status = _cudaLaunchKernelEx(&config, kernels[0], params))) return;
  config.num_attributes = 0;
  *status = _cudaLaunchKernelEx(&config, kernels[1], params + 1);
}

constexpr int32_t kFirstParams[] = {8, 4};
constexpr int32_t kSecondParams[] = {4};
constexpr KernelSignature kSignatures[] = {{"first", kFirstParams, 2},
                                           {"second", kSecondParams, 1}};
const Object kObject = {"object", Init, LoadToDevice, CallObject, kSignatures, 2};
const Object kNamesUnknownKernel = {"unknown", Init, LoadToDevice, CallObject, kSignatures, 1};

// ---- Tests --------------------------------------------------------------------------------------

void Fill(Arguments* arguments) {
  arguments->Add(reinterpret_cast<const void*>(0x1234));
  arguments->Add(int32_t{42});
  arguments->Add(static_cast<const void*>(nullptr));
}

void RecordKeepsEveryLaunch() {
  for (int repeat = 0; repeat < 2; ++repeat) {
    Arguments arguments;
    Fill(&arguments);
    std::vector<Launch> launches;
    Check(!Record(kObject, 132, &arguments, &launches).has_value(), "record succeeds");
    Check(launches.size() == 2, "two launches");
    const Launch& first = launches[0];
    Check(first.kernel == "first" && launches[1].kernel == "second", "kernel names");
    Check(first.grid[0] == 8 && first.grid[1] == 2 && first.block[0] == 384, "grid and block");
    Check(first.shared_bytes == 200000, "shared memory");
    Check(first.cluster[0] == 2 && launches[1].cluster[0] == 1, "cluster, 1 where not given");
    Check(first.is_programmatic && !first.is_cooperative, "launch flags");
    Check(!launches[1].is_programmatic, "flags of one launch do not reach the next");
    const uint64_t pointer = 0x1234;
    Check(first.params.size() == 2 && first.params[0].size() == 8 &&
              std::memcmp(first.params[0].data(), &pointer, 8) == 0,
          "bytes of a pointer");
    const int32_t number = 42;
    Check(launches[1].params.size() == 1 && launches[1].params[0].size() == 4 &&
              std::memcmp(launches[1].params[0].data(), &number, 4) == 0,
          "bytes of an int32");
  }
  Check(num_inits == 1, "an object is read once");
}

void UnknownKernelIsNamed() {
  Arguments arguments;
  Fill(&arguments);
  std::vector<Launch> launches;
  const Failure failure = Record(kNamesUnknownKernel, 132, &arguments, &launches);
  Check(failure.has_value() && failure->find("unknown: second failed: 500") == 0,
        "error names variant, kernel and code");
}

void CallNeedsLoad() {
  Arguments arguments;
  Fill(&arguments);
  const Failure failure = Call(kObject, 3, &arguments);
  Check(failure.has_value() && failure->find("not loaded on device 3") != std::string::npos,
        "a launch before loading is refused");
}

void OrdinalsAreChecked() {
  Device device;
  Check(QueryDevice(64, nullptr, &device).has_value(), "too large an ordinal is refused");
  Check(QueryDevice(-1, nullptr, &device).has_value(), "a negative ordinal is refused");
}

void WithoutDriverOrContextThereIsAReason() {
  Device device;
  const Failure query = QueryDevice(0, nullptr, &device);
  const Failure load = Load(kObject, 0, nullptr);
  Check(query.has_value() && !query->empty(), "a device that cannot be asked");
  Check(load.has_value() && !load->empty(), "a device that cannot be loaded to");
}

void ObjectsOutsideOfCallsAreRefused() {
  Check(_cudaLaunchKernelEx(nullptr, nullptr, nullptr) == 3, "a launch outside of a call fails");
}

}  // namespace
}  // namespace jax_fa

int main() {
  jax_fa::RecordKeepsEveryLaunch();
  jax_fa::UnknownKernelIsNamed();
  jax_fa::CallNeedsLoad();
  jax_fa::OrdinalsAreChecked();
  jax_fa::WithoutDriverOrContextThereIsAReason();
  jax_fa::ObjectsOutsideOfCallsAreRefused();
  std::printf("driver_test: %d failed\n", jax_fa::failed);
  return jax_fa::failed != 0;
}

#include "driver.h"

#include <dlfcn.h>

#include <cstring>
#include <mutex>
#include <utility>

namespace jax_fa {
namespace {

// The few types and values of the CUDA driver API that are needed, as cuda.h of CUDA 13.0 defines
// them. Attribute numbers of the runtime API, which objects use, are equal to the driver's.
using Result = int32_t;
constexpr Result kSuccess = 0;
constexpr Result kNotInitialized = 3;
constexpr Result kNotFound = 500;
constexpr Result kNotSupported = 801;
constexpr int32_t kMultiprocessorCount = 16;
constexpr int32_t kCapabilityMajor = 75;
constexpr int32_t kCapabilityMinor = 76;
constexpr int32_t kMaxSharedBytesPerBlock = 97;

constexpr uint32_t kCooperative = 2;
constexpr uint32_t kClusterDimension = 4;
constexpr uint32_t kProgrammatic = 6;

struct LaunchAttribute {
  uint32_t id;
  uint32_t padding;
  uint32_t value[16];
};

// cudaLaunchConfig_t: what objects hand over.
struct RuntimeLaunchConfig {
  uint32_t grid[3];
  uint32_t block[3];
  uint64_t shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  uint32_t num_attributes;
};

// CUlaunchConfig: what the driver takes.
struct DriverLaunchConfig {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  uint32_t num_attributes;
};

constexpr uint32_t kMaxAttributes = 32;
constexpr int32_t kMaxDevices = 64;  // bits of ObjectState::devices

// libcuda.so.1, or why there is none.
class Cuda {
 public:
  static const Cuda& Get() {
    static const Cuda cuda;
    return cuda;
  }

  Failure failure;
  Result (*GetErrorName)(Result, const char**) = nullptr;
  Result (*GetErrorString)(Result, const char**) = nullptr;
  Result (*LibraryLoadData)(void**, const void*, void*, void**, uint32_t, void*, void**,
                            uint32_t) = nullptr;
  Result (*LibraryGetKernel)(void**, void*, const char*) = nullptr;
  Result (*KernelGetAttribute)(int32_t*, int32_t, void*, int32_t) = nullptr;
  Result (*KernelSetAttribute)(int32_t, int32_t, void*, int32_t) = nullptr;
  Result (*KernelGetFunction)(void**, void*) = nullptr;
  Result (*FuncLoad)(void*) = nullptr;
  Result (*LaunchKernelEx)(const DriverLaunchConfig*, void*, void**, void**) = nullptr;
  Result (*DeviceGetAttribute)(int32_t*, int32_t, int32_t) = nullptr;
  Result (*StreamGetCtx)(void*, void**) = nullptr;
  Result (*CtxPushCurrent)(void*) = nullptr;
  Result (*CtxPopCurrent)(void**) = nullptr;
  Result (*CtxGetDevice)(int32_t*) = nullptr;

 private:
  Cuda() {
    library_ = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr) {
      failure = std::string("the NVIDIA driver is not available: ") + dlerror();
      return;
    }
    Result (*init)(uint32_t) = nullptr;
    Find("cuInit", &init);
    Find("cuGetErrorName", &GetErrorName);
    Find("cuGetErrorString", &GetErrorString);
    Find("cuLibraryLoadData", &LibraryLoadData);
    Find("cuLibraryGetKernel", &LibraryGetKernel);
    Find("cuKernelGetAttribute", &KernelGetAttribute);
    Find("cuKernelSetAttribute", &KernelSetAttribute);
    Find("cuKernelGetFunction", &KernelGetFunction);
    Find("cuFuncLoad", &FuncLoad);
    Find("cuLaunchKernelEx", &LaunchKernelEx);
    Find("cuDeviceGetAttribute", &DeviceGetAttribute);
    Find("cuStreamGetCtx", &StreamGetCtx);
    Find("cuCtxPushCurrent_v2", &CtxPushCurrent);
    Find("cuCtxPopCurrent_v2", &CtxPopCurrent);
    Find("cuCtxGetDevice", &CtxGetDevice);
    if (failure.has_value()) return;
    if (const Result result = init(0); result != kSuccess) {
      failure = "cuInit failed with code " + std::to_string(result);
    }
  }

  template <typename Function>
  void Find(const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(library_, name));
    if (*function == nullptr && !failure.has_value()) {
      failure = std::string("the NVIDIA driver lacks ") + name +
                "; jax_fa needs a driver of CUDA 12.4 or newer";
    }
  }

  void* library_ = nullptr;
};

std::string Describe(const char* call, Result result) {
  std::string text = std::string(call) + " failed: " + std::to_string(result);
  const Cuda& cuda = Cuda::Get();
  const char* name = nullptr;
  const char* meaning = nullptr;
  if (cuda.GetErrorName != nullptr && cuda.GetErrorName(result, &name) == kSuccess) {
    text += std::string(" ") + name;
  }
  if (cuda.GetErrorString != nullptr && cuda.GetErrorString(result, &meaning) == kSuccess) {
    text += std::string(", ") + meaning;
  }
  return text;
}

// Makes the context of a stream current for a scope.
class CurrentContext {
 public:
  explicit CurrentContext(void* stream) {
    const Cuda& cuda = Cuda::Get();
    void* context = nullptr;
    const char* call = "cuStreamGetCtx";
    Result result = cuda.StreamGetCtx(stream, &context);
    if (result == kSuccess) {
      call = "cuCtxPushCurrent";
      result = cuda.CtxPushCurrent(context);
    }
    if (result == kSuccess) {
      is_pushed_ = true;
      call = "cuCtxGetDevice";
      result = cuda.CtxGetDevice(&device_);
    }
    if (result != kSuccess) failure_ = Describe(call, result);
  }
  ~CurrentContext() {
    void* context;
    if (is_pushed_) Cuda::Get().CtxPopCurrent(&context);
  }
  CurrentContext(const CurrentContext&) = delete;

  const Failure& failure() const { return failure_; }
  int32_t device() const { return device_; }  // CUdevice

 private:
  bool is_pushed_ = false;
  int32_t device_ = 0;
  Failure failure_;
};

std::mutex loading;

}  // namespace

// What the C functions at the end of this file need to know of the call they belong to.
class Session {
 public:
  // Driver mode on `device` (a CUdevice), or record mode for `num_sms` into `launches`.
  Session(const Object& object, int32_t device) : object(object), device(device) { Enter(); }
  Session(const Object& object, int32_t num_sms, std::vector<Launch>* launches)
      : object(object), num_sms(num_sms), launches(launches) {
    Enter();
  }
  ~Session() { current_ = outer_; }
  Session(const Session&) = delete;

  static Session* Current() { return current_; }
  bool is_recording() const { return launches != nullptr; }

  // Reads the image and hands the object its kernel handles.
  Failure Link() {
    ObjectState& state = object.state;
    void* library = &state;
    void* library_address = &library;
    Result result = kSuccess;
    if (state.image == nullptr) {
      void* arguments[] = {&library_address, &result};
      object.init(arguments);
    }
    if (result == kSuccess) {
      void* arguments[] = {&library_address, &device, &result};
      object.load_to_device(arguments);
    }
    return Conclude("loading", result);
  }

  Failure Run(Arguments* arguments) {
    Result result = kSuccess;
    arguments->addresses_[arguments->count_] = &result;
    object.call(arguments->addresses_, arguments->count_ + 1);
    return Conclude("launching", result);
  }

  // Passes `result` on and remembers the first call that failed.
  Result Check(const char* call, Result result) {
    if (result != kSuccess && !failure_.has_value()) failure_ = Describe(call, result);
    return result;
  }

  const Object& object;
  int32_t device = 0;
  int32_t num_sms = 0;
  std::vector<Launch>* launches = nullptr;

 private:
  void Enter() {
    outer_ = current_;
    current_ = this;
  }
  // An object may refuse without a failed call (its own checks); its status then says so.
  Failure Conclude(const char* doing, Result result) {
    if (result == kSuccess) return std::nullopt;
    if (!failure_.has_value()) failure_ = Describe(doing, result);
    return std::string(object.name) + ": " + *failure_;
  }

  static thread_local Session* current_;
  Session* outer_ = nullptr;
  Failure failure_;
};

thread_local Session* Session::current_ = nullptr;

namespace {

struct KnownDevice {
  std::atomic<bool> is_known{false};
  Device device;
};

KnownDevice known_devices[kMaxDevices];

Failure CheckOrdinal(int32_t ordinal) {
  if (ordinal >= 0 && ordinal < kMaxDevices) return std::nullopt;
  return "device ordinal " + std::to_string(ordinal) + " is not below " +
         std::to_string(kMaxDevices);
}

// With lazy module loading, the driver's default, the first launch would load the code, and may
// synchronise to do so.
Failure LoadEagerly(const Object& object) {
  const Cuda& cuda = Cuda::Get();
  for (const KernelHandle& handle : object.state.handles) {
    void* function = nullptr;
    const char* call = "cuKernelGetFunction";
    Result result = cuda.KernelGetFunction(&function, handle.kernel);
    if (result == kSuccess) {
      call = "cuFuncLoad";
      result = cuda.FuncLoad(function);
    }
    if (result != kSuccess) return std::string(object.name) + ": " + Describe(call, result);
  }
  return std::nullopt;
}

}  // namespace

Failure QueryDevice(int32_t ordinal, void* stream, Device* device) {
  if (const Failure failure = CheckOrdinal(ordinal)) return failure;
  KnownDevice& known = known_devices[ordinal];
  if (!known.is_known.load(std::memory_order_acquire)) {
    const Cuda& cuda = Cuda::Get();
    if (cuda.failure.has_value()) return cuda.failure;
    std::lock_guard<std::mutex> lock(loading);
    if (known.is_known.load(std::memory_order_relaxed)) {  // Another thread was first.
      *device = known.device;
      return std::nullopt;
    }
    const CurrentContext context(stream);
    if (context.failure().has_value()) return context.failure();
    int32_t major = 0, minor = 0, num_sms = 0;
    for (const auto& [attribute, value] :
         {std::pair{kCapabilityMajor, &major}, std::pair{kCapabilityMinor, &minor},
          std::pair{kMultiprocessorCount, &num_sms}}) {
      const Result result = cuda.DeviceGetAttribute(value, attribute, context.device());
      if (result != kSuccess) return Describe("cuDeviceGetAttribute", result);
    }
    known.device = {10 * major + minor, num_sms};
    known.is_known.store(true, std::memory_order_release);
  }
  *device = known.device;
  return std::nullopt;
}

Failure Load(const Object& object, int32_t ordinal, void* stream) {
  if (const Failure failure = CheckOrdinal(ordinal)) return failure;
  ObjectState& state = object.state;
  const uint64_t bit = uint64_t{1} << ordinal;
  if (state.devices.load(std::memory_order_acquire) & bit) return std::nullopt;
  const Cuda& cuda = Cuda::Get();
  if (cuda.failure.has_value()) return cuda.failure;
  std::lock_guard<std::mutex> lock(loading);
  // HAZARD: linking anew would write what other threads read, where another thread was first.
  if (state.devices.load(std::memory_order_relaxed) & bit) return std::nullopt;
  const CurrentContext context(stream);
  if (context.failure().has_value()) return context.failure();
  Session session(object, context.device());
  if (const Failure failure = session.Link()) return failure;
  if (const Failure failure = LoadEagerly(object)) return failure;
  state.is_linked = true;
  state.devices.fetch_or(bit, std::memory_order_release);
  return std::nullopt;
}

Failure Call(const Object& object, int32_t ordinal, Arguments* arguments) {
  if (const Failure failure = CheckOrdinal(ordinal)) return failure;
  if (!(object.state.devices.load(std::memory_order_acquire) & (uint64_t{1} << ordinal))) {
    return std::string(object.name) + ": not loaded on device " + std::to_string(ordinal) +
           "; XLA runs the initialize stage before the execute stage";
  }
  Session session(object, ordinal);  // launching asks for no device
  return session.Run(arguments);
}

Failure Record(const Object& object, int32_t num_sms, Arguments* arguments,
               std::vector<Launch>* launches) {
  Session session(object, num_sms, launches);
  {
    std::lock_guard<std::mutex> lock(loading);
    if (!object.state.is_linked) {
      if (const Failure failure = session.Link()) return failure;
      object.state.is_linked = true;
    }
  }
  return session.Run(arguments);
}

namespace {

// The handle for the kernel called `name`, made on first use.
KernelHandle* HandleOf(const Object& object, const char* name) {
  std::deque<KernelHandle>& handles = object.state.handles;
  for (KernelHandle& handle : handles) {
    if (std::strcmp(handle.signature->name, name) == 0) return &handle;
  }
  for (int32_t i = 0; i < object.num_kernels; ++i) {
    if (std::strcmp(object.kernels[i].name, name) == 0) {
      handles.push_back({&object.kernels[i], nullptr});
      return &handles.back();
    }
  }
  return nullptr;
}

Result LaunchNow(const RuntimeLaunchConfig& config, const KernelHandle& handle, void** arguments) {
  LaunchAttribute attributes[kMaxAttributes];
  DriverLaunchConfig launch{};
  std::memcpy(launch.grid, config.grid, sizeof launch.grid);
  std::memcpy(launch.block, config.block, sizeof launch.block);
  launch.shared_bytes = static_cast<uint32_t>(config.shared_bytes);
  launch.stream = config.stream;
  launch.attributes = attributes;
  for (uint32_t i = 0; i < config.num_attributes && i < kMaxAttributes; ++i) {
    const LaunchAttribute& attribute = config.attributes[i];
    // Objects always name these two; a zero asks for nothing.
    const bool is_flag = attribute.id == kCooperative || attribute.id == kProgrammatic;
    if (is_flag && attribute.value[0] == 0) continue;
    attributes[launch.num_attributes++] = attribute;
  }
  return Cuda::Get().LaunchKernelEx(&launch, handle.kernel, arguments, nullptr);
}

Launch Recorded(const RuntimeLaunchConfig& config, const KernelSignature& kernel,
                void** arguments) {
  Launch launch{};
  launch.kernel = kernel.name;
  std::memcpy(launch.grid, config.grid, sizeof launch.grid);
  std::memcpy(launch.block, config.block, sizeof launch.block);
  launch.shared_bytes = config.shared_bytes;
  for (uint32_t& extent : launch.cluster) extent = 1;
  for (uint32_t i = 0; i < config.num_attributes; ++i) {
    const LaunchAttribute& attribute = config.attributes[i];
    if (attribute.id == kClusterDimension) {
      std::memcpy(launch.cluster, attribute.value, sizeof launch.cluster);
    }
    if (attribute.id == kCooperative) launch.is_cooperative = attribute.value[0] != 0;
    if (attribute.id == kProgrammatic) launch.is_programmatic = attribute.value[0] != 0;
  }
  for (int32_t i = 0; i < kernel.num_params; ++i) {
    launch.params.emplace_back(static_cast<const char*>(arguments[i]), kernel.param_bytes[i]);
  }
  return launch;
}

}  // namespace
}  // namespace jax_fa

// The functions that compiled objects call, and no others. Their names and signatures are the
// exporter's: a leading underscore, then the CUDA function each stands for. A library is an
// ObjectState and a kernel a KernelHandle, in both modes.

using jax_fa::KernelHandle;
using jax_fa::Session;

extern "C" {

int32_t _cudaLibraryLoadData(void**, const void* image, void*, void**, uint32_t, void*, void**,
                             uint32_t) {
  Session* session = Session::Current();
  if (session == nullptr) return jax_fa::kNotInitialized;
  session->object.state.image = image;
  return jax_fa::kSuccess;
}

int32_t _cudaLibraryGetKernel(void** kernel, void*, const char* name) {
  Session* session = Session::Current();
  if (session == nullptr) return jax_fa::kNotInitialized;
  KernelHandle* handle = jax_fa::HandleOf(session->object, name);
  if (handle == nullptr) return session->Check(name, jax_fa::kNotFound);
  *kernel = handle;
  if (session->is_recording() || handle->kernel != nullptr) return jax_fa::kSuccess;
  jax_fa::ObjectState& state = session->object.state;
  const jax_fa::Cuda& cuda = jax_fa::Cuda::Get();
  if (state.library == nullptr) {
    const int32_t result =
        cuda.LibraryLoadData(&state.library, state.image, nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (session->Check("cuLibraryLoadData", result) != jax_fa::kSuccess) return result;
  }
  return session->Check("cuLibraryGetKernel",
                        cuda.LibraryGetKernel(&handle->kernel, state.library, name));
}

int32_t _cudaGetDevice(int32_t* device) {
  const Session* session = Session::Current();
  if (session == nullptr) return jax_fa::kNotInitialized;
  *device = session->device;
  return jax_fa::kSuccess;
}

int32_t _cudaDeviceGetAttribute(int32_t* value, int32_t attribute, int32_t device) {
  Session* session = Session::Current();
  if (session == nullptr) return jax_fa::kNotInitialized;
  if (!session->is_recording()) {
    return session->Check("cuDeviceGetAttribute",
                          jax_fa::Cuda::Get().DeviceGetAttribute(value, attribute, device));
  }
  switch (attribute) {
    case jax_fa::kMaxSharedBytesPerBlock:
      *value = jax_fa::kRecordedSharedBytes;
      return jax_fa::kSuccess;
    case jax_fa::kMultiprocessorCount:
      *value = session->num_sms;
      return jax_fa::kSuccess;
    default:
      return session->Check("cuDeviceGetAttribute (recording)", jax_fa::kNotSupported);
  }
}

int32_t _cuKernelGetAttribute(int32_t* value, int32_t attribute, void* kernel, int32_t device) {
  Session* session = Session::Current();
  if (session == nullptr) return jax_fa::kNotInitialized;
  if (session->is_recording()) {
    *value = 0;
    return jax_fa::kSuccess;
  }
  return session->Check("cuKernelGetAttribute",
                        jax_fa::Cuda::Get().KernelGetAttribute(
                            value, attribute, static_cast<KernelHandle*>(kernel)->kernel, device));
}

int32_t _cudaKernelSetAttributeForDevice(void* kernel, int32_t attribute, int32_t value,
                                         int32_t device) {
  Session* session = Session::Current();
  if (session == nullptr) return jax_fa::kNotInitialized;
  if (session->is_recording()) return jax_fa::kSuccess;
  return session->Check("cuKernelSetAttribute",
                        jax_fa::Cuda::Get().KernelSetAttribute(
                            attribute, value, static_cast<KernelHandle*>(kernel)->kernel, device));
}

int32_t _cudaFuncSetAttribute(void* kernel, int32_t attribute, int32_t value) {
  const Session* session = Session::Current();
  if (session == nullptr) return jax_fa::kNotInitialized;
  return _cudaKernelSetAttributeForDevice(kernel, attribute, value, session->device);
}

int32_t _cudaLaunchKernelEx(const void* config, void* kernel, void** arguments) {
  Session* session = Session::Current();
  if (session == nullptr) return jax_fa::kNotInitialized;
  const auto& launch = *static_cast<const jax_fa::RuntimeLaunchConfig*>(config);
  const auto& handle = *static_cast<const KernelHandle*>(kernel);
  if (session->is_recording()) {
    session->launches->push_back(jax_fa::Recorded(launch, *handle.signature, arguments));
    return jax_fa::kSuccess;
  }
  return session->Check("cuLaunchKernelEx", jax_fa::LaunchNow(launch, handle, arguments));
}

}  // extern "C"

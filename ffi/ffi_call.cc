#include "ffi_call.h"

#include <thread>
#include <type_traits>

// XLA leaves these two to the runtime.
struct XLA_FFI_Error {
  jax_fa::FfiOutcome outcome;
};

struct XLA_FFI_ExecutionContext {
  int num_threads;
  std::vector<std::thread> tasks;
};

namespace jax_fa {
namespace {

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  return new XLA_FFI_Error{{args->errc, args->message}};
}

void GetMessage(XLA_FFI_Error_GetMessage_Args* args) {
  args->message = args->error->outcome.message.c_str();
}

void DestroyError(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }

XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = nullptr;
  return nullptr;
}

XLA_FFI_Error* GetDeviceOrdinal(XLA_FFI_DeviceOrdinal_Get_Args* args) {
  args->device_ordinal = 0;
  return nullptr;
}

// Every task has a thread of its own, which Invoke joins.
XLA_FFI_Error* ScheduleTask(XLA_FFI_ThreadPool_Schedule_Args* args) {
  args->ctx->tasks.emplace_back(args->task, args->data);
  return nullptr;
}

XLA_FFI_Error* GetNumThreads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = args->ctx->num_threads;
  return nullptr;
}

const XLA_FFI_Api& Api() {
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api made{};
    made.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    made.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                        XLA_FFI_API_MINOR};
    made.XLA_FFI_Error_Create = CreateError;
    made.XLA_FFI_Error_GetMessage = GetMessage;
    made.XLA_FFI_Error_Destroy = DestroyError;
    made.XLA_FFI_Stream_Get = GetStream;
    made.XLA_FFI_DeviceOrdinal_Get = GetDeviceOrdinal;
    made.XLA_FFI_ThreadPool_Schedule = ScheduleTask;
    made.XLA_FFI_ThreadPool_NumThreads = GetNumThreads;
    return made;
  }();
  return api;
}

XLA_FFI_DataType TypeOf(float) { return XLA_FFI_DataType_F32; }
XLA_FFI_DataType TypeOf(double) { return XLA_FFI_DataType_F64; }
XLA_FFI_DataType TypeOf(int32_t) { return XLA_FFI_DataType_S32; }
XLA_FFI_DataType TypeOf(int64_t) { return XLA_FFI_DataType_S64; }
XLA_FFI_DataType TypeOf(bool) { return XLA_FFI_DataType_PRED; }

// Arrays as the C API wants them; they live as long as this does.
struct Buffers {
  std::vector<std::vector<int64_t>> shapes;
  std::vector<XLA_FFI_Buffer> buffers;
  std::vector<void*> pointers;

  explicit Buffers(const std::vector<FfiArray>& arrays) {
    for (const FfiArray& array : arrays) shapes.push_back(array.shape);
    for (size_t i = 0; i < arrays.size(); ++i) {
      buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, arrays[i].dtype, arrays[i].data,
                         static_cast<int64_t>(shapes[i].size()), shapes[i].data()});
    }
    for (XLA_FFI_Buffer& buffer : buffers) pointers.push_back(&buffer);
  }
};

// Likewise attributes.
struct Attributes {
  std::map<std::string, FfiAttribute> values;
  std::vector<XLA_FFI_ByteSpan> names, strings;
  std::vector<XLA_FFI_Scalar> scalars;
  std::vector<XLA_FFI_AttrType> types;
  std::vector<XLA_FFI_ByteSpan*> name_pointers;
  std::vector<void*> pointers;

  explicit Attributes(const std::map<std::string, FfiAttribute>& given) : values(given) {
    // Pointers into these vectors are taken while they grow.
    names.reserve(values.size());
    strings.reserve(values.size());
    scalars.reserve(values.size());
    for (auto& [name, value] : values) {
      names.push_back({name.data(), name.size()});
      name_pointers.push_back(&names.back());
      std::visit([this](auto& x) { Add(x); }, value);
    }
  }
  template <typename T>
  void Add(T& value) {
    if constexpr (std::is_same_v<T, std::string>) {
      strings.push_back({value.data(), value.size()});
      types.push_back(XLA_FFI_AttrType_STRING);
      pointers.push_back(&strings.back());
    } else {
      scalars.push_back({TypeOf(value), &value});
      types.push_back(XLA_FFI_AttrType_SCALAR);
      pointers.push_back(&scalars.back());
    }
  }
};

}  // namespace

FfiOutcome Invoke(XLA_FFI_Handler* handler, const FfiCall& call) {
  Buffers operands(call.operands), results(call.results);
  Attributes attributes(call.attributes);
  std::vector<XLA_FFI_ArgType> arg_types(call.operands.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(call.results.size(), XLA_FFI_RetType_BUFFER);
  XLA_FFI_ExecutionContext context{call.num_threads, {}};
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &Api();
  frame.ctx = &context;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(arg_types.size()),
                arg_types.data(), operands.pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(ret_types.size()),
                ret_types.data(), results.pointers.data()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE,
                 nullptr,
                 static_cast<int64_t>(attributes.types.size()),
                 attributes.types.data(),
                 attributes.name_pointers.data(),
                 attributes.pointers.data()};
  XLA_FFI_Error* error = handler(&frame);
  for (std::thread& task : context.tasks) task.join();
  if (error == nullptr) return {XLA_FFI_Error_Code_OK, ""};
  const FfiOutcome outcome = error->outcome;
  delete error;
  return outcome;
}

}  // namespace jax_fa

#include "record.h"

#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "checks.h"
#include "driver.h"
#include "kernel_table.h"
#include "kernels.h"

namespace nb = nanobind;

namespace jax_fa {
namespace {

// More than any GPU has; kernels multiply it by small numbers in 32 bits.
constexpr int32_t kMaxSms = 1 << 16;

// Reads fields by name and counts them, so that a misspelt one does not pass for an absent one.
class Fields {
 public:
  explicit Fields(const nb::dict& values) : values_(values) {}

  template <typename T>
  T Number(const char* name) {
    if (!values_.contains(name)) return T{};
    ++num_read_;
    T value{};
    const nb::object given = values_[name];
    if (!nb::try_cast<T>(given, value)) {
      throw std::invalid_argument(std::string("record: ") + name + " is " +
                                  nb::repr(given).c_str() + ", which its C++ type does not hold");
    }
    return value;
  }
  template <typename T>
  void Address(const char* name, T** pointer) {
    *pointer = reinterpret_cast<T*>(Number<uintptr_t>(name));
  }
  void CheckAllRead() const {
    if (num_read_ != nb::len(values_)) {
      throw std::invalid_argument("record: the call has fields that this operation does not");
    }
  }

 private:
  const nb::dict& values_;
  size_t num_read_ = 0;
};

DType ReadDType(Fields& fields) {
  const auto name = fields.Number<std::string>("dtype");
  if (name == "float32") return DType::kF32;
  if (name == "bfloat16") return DType::kBF16;
  if (name == "float16") return DType::kF16;
  throw std::invalid_argument("record: dtype is '" + name + "', not a kernel's element type");
}

Problem ReadProblem(Fields& fields) {
  Problem p{};
  p.dtype = ReadDType(fields);
  p.batch = fields.Number<int64_t>("batch");
  p.num_sequences = fields.Number<int64_t>("num_sequences");
  p.q_len = fields.Number<int64_t>("q_len");
  p.kv_len = fields.Number<int64_t>("kv_len");
  p.num_q_heads = fields.Number<int64_t>("num_q_heads");
  p.num_kv_heads = fields.Number<int64_t>("num_kv_heads");
  p.head_dim = fields.Number<int64_t>("head_dim");
  p.value_dim = fields.Number<int64_t>("value_dim");
  p.scale = fields.Number<float>("scale");
  p.soft_cap = fields.Number<float>("soft_cap");
  p.window_left = fields.Number<int32_t>("window_left");
  p.window_right = fields.Number<int32_t>("window_right");
  p.bottom_right = fields.Number<bool>("bottom_right");
  p.deterministic = fields.Number<bool>("deterministic");
  const char* mask_mod = fields.Number<const char*>("mask_mod");  // lives as long as the call
  p.mask_mod = mask_mod == nullptr ? "" : mask_mod;
  return p;
}

// What both operations have.
template <typename Params>
Params ReadInputs(Fields& fields) {
  Params params{};
  params.problem = ReadProblem(fields);
  Extras& extras = params.extras;
  fields.Address("q_lengths", &extras.q_lengths);
  fields.Address("kv_lengths", &extras.kv_lengths);
  fields.Address("cu_seqlens_q", &extras.cu_seqlens_q);
  fields.Address("cu_seqlens_k", &extras.cu_seqlens_k);
  fields.Address("q_segments", &extras.q_segments);
  fields.Address("kv_segments", &extras.kv_segments);
  fields.Address("q_offset", &extras.q_offset);
  fields.Address("sinks", &extras.sinks);
  fields.Address("q", &params.q);
  fields.Address("k", &params.k);
  fields.Address("v", &params.v);
  fields.Address("out", &params.out);
  fields.Address("lse", &params.lse);
  return params;
}

FwdParams ReadForward(Fields& fields) {
  FwdParams params = ReadInputs<FwdParams>(fields);
  fields.Address("out_parts", &params.scratch.out_parts);
  fields.Address("lse_parts", &params.scratch.lse_parts);
  params.scratch.num_splits = fields.Number<int64_t>("num_splits");
  return params;
}

BwdParams ReadBackward(Fields& fields) {
  BwdParams params = ReadInputs<BwdParams>(fields);
  fields.Address("dout", &params.dout);
  fields.Address("dlse", &params.dlse);
  fields.Address("dq", &params.dq);
  fields.Address("dk", &params.dk);
  fields.Address("dv", &params.dv);
  fields.Address("dsinks", &params.dsinks);
  fields.Address("dq_sum", &params.scratch.dq_sum);
  fields.Address("row_stats", &params.scratch.row_stats);
  fields.Address("dkv_sums", &params.scratch.dkv_sums);
  fields.Address("turns", &params.scratch.turns);
  return params;
}

nb::tuple Triple(const uint32_t (&extents)[3]) {
  return nb::make_tuple(extents[0], extents[1], extents[2]);
}

nb::dict ToPython(const Launch& launch) {
  nb::list params;
  for (const std::string& bytes : launch.params) {
    params.append(nb::bytes(bytes.data(), bytes.size()));
  }
  nb::dict result;
  result["kernel"] = launch.kernel;
  result["grid"] = Triple(launch.grid);
  result["block"] = Triple(launch.block);
  result["cluster"] = Triple(launch.cluster);
  result["shared_bytes"] = launch.shared_bytes;
  result["is_cooperative"] = launch.is_cooperative;
  result["is_programmatic"] = launch.is_programmatic;
  result["params"] = params;
  return result;
}

void Raise(const Complaint& complaint) {
  if (complaint) throw std::invalid_argument("record: " + *complaint);
}

template <typename Params>
nb::dict RecordCall(const Params& params, const Device& device) {
  const int32_t arch = ArchOf(device.capability);
  if (arch == 0) {
    throw std::invalid_argument("record: no kernels are compiled for compute capability " +
                                std::to_string(device.capability));
  }
  Raise(CheckProblem(params.problem));
  Raise(CheckGpuProblem(params.problem));
  Raise(CheckArrays(params));
  Raise(CheckScratch(params));
  const VariantKey key = KeyOf(params, arch);
  const Variant* variant = FindVariant(key);
  if (variant == nullptr) throw std::invalid_argument("record: " + Refusal(key));
  Arguments arguments;
  FillArguments(params, device, nullptr, &arguments);
  std::vector<Launch> launches;
  if (const Failure failure = Record(variant->object, device.num_sms, &arguments, &launches)) {
    throw std::runtime_error("record: " + *failure);
  }
  nb::list recorded;
  for (const Launch& launch : launches) recorded.append(ToPython(launch));
  nb::dict result;
  result["variant"] = variant->object.name;
  result["ptx_sha256"] = variant->ptx_sha256;
  result["launches"] = recorded;
  return result;
}

}  // namespace

nb::dict Record(const std::string& operation, int32_t capability, const nb::dict& call,
                int32_t num_sms) {
  if (num_sms < 1 || num_sms > kMaxSms) {
    throw std::invalid_argument("record: num_sms is " + std::to_string(num_sms) +
                                "; a GPU has 1 to " + std::to_string(kMaxSms));
  }
  const Device device{capability, num_sms};
  Fields fields(call);
  if (operation == "fwd") {
    const FwdParams params = ReadForward(fields);
    fields.CheckAllRead();
    return RecordCall(params, device);
  }
  if (operation == "bwd") {
    const BwdParams params = ReadBackward(fields);
    fields.CheckAllRead();
    return RecordCall(params, device);
  }
  throw std::invalid_argument("record: operation is '" + operation + "', not 'fwd' or 'bwd'");
}

nb::list VariantNames() {
  const Table& table = KernelTable();
  nb::list names;
  for (int32_t i = 0; i < table.num_variants; ++i) names.append(table.variants[i].object.name);
  return names;
}

}  // namespace jax_fa

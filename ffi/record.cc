#include "record.h"

#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "checks.h"
#include "driver.h"
#include "kernel_table.h"
#include "schema.h"

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

// What is absent is 0, or empty. Texts live as long as the call.
template <typename Params>
Params ReadParams(Fields& fields) {
  Params params{};
  Problem& p = params.problem;
  p.dtype = ReadDType(fields);
  const auto number = [&fields](const char* name, auto& value) {
    value = fields.Number<std::decay_t<decltype(value)>>(name);
  };
  const auto attribute = [&](const char* name, auto& value, bool) {
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, std::string_view>) {
      const char* text = fields.Number<const char*>(name);
      value = text == nullptr ? "" : text;
    } else {
      number(name, value);
    }
  };
  const auto address = [&fields](const Array& array, auto& pointer) {
    using Pointer = std::decay_t<decltype(pointer)>;
    pointer = reinterpret_cast<Pointer>(fields.Number<uintptr_t>(array.name));
  };
  Problem::Extents(p, number);
  Problem::Attributes(p, attribute);
  Params::Operands(params, address);
  Params::Results(params, address);
  Params::Scratch(params, address);
  if constexpr (std::is_same_v<Params, FwdParams>) number("num_splits", p.num_splits);
  if constexpr (std::is_same_v<Params, BwdParams>) {
    number("dq_dim", p.dq_dim);
    p.gives_dbias = params.dbias != nullptr;
  }
  fields.CheckAllRead();
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
  Raise(CheckProblem(params.problem));
  Raise(CheckGpuProblem(params.problem));
  Raise(CheckArrays(params));
  Raise(CheckScratch(params));
  const auto [variant, complaint] =
      FindVariant(Params::kOperation, device.capability, params.problem.kernel);
  if (variant == nullptr) Raise(complaint);
  Raise(Mismatch(*variant, params.problem));
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
  if (operation == "fwd") return RecordCall(ReadParams<FwdParams>(fields), device);
  if (operation == "bwd") return RecordCall(ReadParams<BwdParams>(fields), device);
  if (operation == "dbias") return RecordCall(ReadParams<DbiasParams>(fields), device);
  throw std::invalid_argument("record: operation is '" + operation +
                              "', not 'fwd', 'bwd' or 'dbias'");
}

nb::list VariantNames() {
  const Table& table = KernelTable();
  nb::list names;
  for (int32_t i = 0; i < table.num_variants; ++i) names.append(table.variants[i].object.name);
  return names;
}

}  // namespace jax_fa

#include "arguments.h"

#include <algorithm>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "checks.h"

namespace jax_fa {
namespace {

namespace ffi = ::xla::ffi;

constexpr const char* kInputs[] = {
    "q",
    "k",
    "v",
    "q_lengths",
    "kv_lengths",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "q_segments",
    "kv_segments",
    "q_offset",
    "sinks",
};
constexpr const char* kBackwardInputs[] = {"out", "lse", "dout", "dlse"};
constexpr const char* kForwardOutputs[] = {"out", "lse"};
constexpr const char* kBackwardOutputs[] = {"dq", "dk", "dv", "dsinks"};

using Shape = std::vector<int64_t>;

// Text is put together without streams: in processes with another C++ library beside this
// extension's they have crashed (seen with jaxlib 0.11 and GCC 13).
std::string ToString(const Shape& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

std::string ToString(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::PRED:
      return "PRED";
    case ffi::DataType::S32:
      return "S32";
    case ffi::DataType::S64:
      return "S64";
    case ffi::DataType::U32:
      return "U32";
    case ffi::DataType::F16:
      return "F16";
    case ffi::DataType::BF16:
      return "BF16";
    case ffi::DataType::F32:
      return "F32";
    case ffi::DataType::F64:
      return "F64";
    default:
      return "type " + std::to_string(static_cast<int>(dtype));
  }
}

std::string ToString(const ffi::AnyBuffer& buffer) {
  return ToString(buffer.element_type()) +
         ToString(Shape(buffer.dimensions().begin(), buffer.dimensions().end()));
}

std::string Join(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

// The names of a call's arrays, in order.
struct Signature {
  const char* operation;
  std::vector<std::string> operands;
  std::vector<std::string> results;
  std::vector<std::string> scratch;  // on CUDA, further results
  bool needs_scratch;                // or it may be left out
};

// Reads buffers by position and remembers the first complaint, so that callers read as a list.
class Reader {
 public:
  // Complains unless there are as many operands and results as the signature has.
  Reader(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, const Signature& signature,
         Platform platform)
      : args_(args), rets_(rets), operation_(signature.operation) {
    const auto& [_, operands, results, scratch, needs_scratch] = signature;
    if (args.size() != operands.size()) {
      Complain("takes " + std::to_string(operands.size()) + " operands (" + Join(operands) +
               "), but got " + std::to_string(args.size()));
    }
    const size_t least = results.size(), most = results.size() + scratch.size();
    const bool takes_scratch = platform == Platform::kCuda;
    has_scratch_ = takes_scratch && rets.size() == most;
    if (has_scratch_ || (rets.size() == least && !(takes_scratch && needs_scratch))) return;
    std::string expected = std::to_string(least) + " results (" + Join(results) + ")";
    if (takes_scratch) {
      expected += std::string(needs_scratch ? " and" : ", or these and") + " as scratch " +
                  std::to_string(scratch.size()) + " more (" + Join(scratch) + ")";
    }
    Complain("gives " + expected + ", but " + std::to_string(rets.size()) + " are asked for");
  }

  // The next operand or result; its element type and shape must be as given.
  void* Next(const char* name, ffi::DataType dtype, const Shape& shape) {
    return Checked(Take(), name, dtype, {shape});
  }
  // The same, or null for an array without elements, which may also have shape [0].
  void* NextOptional(const char* name, ffi::DataType dtype, const Shape& shape) {
    const std::optional<ffi::AnyBuffer> buffer = Take();
    void* data = Checked(buffer, name, dtype, {shape, {0}});
    return buffer.has_value() && buffer->element_count() > 0 ? data : nullptr;
  }
  void* Next(const ScratchArray& array) {
    return Next(array.name, array.is_int32 ? ffi::DataType::S32 : ffi::DataType::F32, array.shape);
  }
  // An operand, without a check.
  std::optional<ffi::AnyBuffer> PeekOperand(size_t index) { return Buffer(args_, index); }
  // The first extent of the next result; 0 if it has none.
  int64_t PeekExtent() const {
    auto buffer = rets_.get<ffi::AnyBuffer>(next_);
    const bool has_rank = buffer.has_value() && (*buffer)->dimensions().size() > 0;
    return has_rank ? (*buffer)->dimensions()[0] : 0;
  }
  void ReadResults() {
    reading_results_ = true;
    next_ = 0;
  }
  void Complain(const std::string& what) {
    if (error_.empty()) error_ = std::string(operation_) + ": " + what;
  }
  void Complain(const Complaint& complaint) {
    if (complaint) Complain(*complaint);
  }
  bool has_scratch() const { return has_scratch_; }
  bool ok() const { return error_.empty(); }
  ffi::Error error() const { return ffi::Error::InvalidArgument(error_); }

 private:
  std::optional<ffi::AnyBuffer> Take() {
    const size_t index = next_++;
    if (!reading_results_) return Buffer(args_, index);
    auto buffer = rets_.get<ffi::AnyBuffer>(index);
    if (buffer.has_value()) return **buffer;
    Complain(buffer.error().message());
    return std::nullopt;
  }
  std::optional<ffi::AnyBuffer> Buffer(const ffi::RemainingArgs& args, size_t index) {
    auto buffer = args.get<ffi::AnyBuffer>(index);
    if (buffer.has_value()) return *buffer;
    Complain(buffer.error().message());
    return std::nullopt;
  }
  // The data of a buffer of that type and one of these shapes.
  void* Checked(const std::optional<ffi::AnyBuffer>& buffer, const char* name, ffi::DataType dtype,
                const std::vector<Shape>& shapes) {
    if (!buffer.has_value()) return nullptr;
    const Shape got(buffer->dimensions().begin(), buffer->dimensions().end());
    const bool fits = std::find(shapes.begin(), shapes.end(), got) != shapes.end();
    if (buffer->element_type() != dtype || !fits) {
      Complain(std::string(name) + " should be " + ToString(dtype) + ToString(shapes[0]) +
               ", but is " + ToString(*buffer) +
               (shapes.size() > 1 ? " (where there is none, " + ToString(dtype) + "[0])" : ""));
      return nullptr;
    }
    return buffer->untyped_data();
  }

  const ffi::RemainingArgs& args_;
  const ffi::RemainingRets& rets_;
  const char* operation_;
  bool has_scratch_ = false;
  size_t next_ = 0;
  bool reading_results_ = false;
  std::string error_;
};

std::optional<DType> KernelDType(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::F32:
      return DType::kF32;
    case ffi::DataType::BF16:
      return DType::kBF16;
    case ffi::DataType::F16:
      return DType::kF16;
    default:
      return std::nullopt;
  }
}

// What ReadInputs learns besides the parameters themselves: the shapes later operands repeat.
struct Layout {
  ffi::DataType dtype = ffi::DataType::INVALID;
  Shape q, k, v, out, lse, sinks;
};

// Derives the extents from q, k, v and cu_seqlens_q; every other operand is checked against them.
bool ReadExtents(Reader& reader, const Attributes& attributes, Problem* problem, Layout* layout) {
  if (!reader.ok()) return false;
  const auto q = reader.PeekOperand(0), k = reader.PeekOperand(1), v = reader.PeekOperand(2);
  const auto cu_q = reader.PeekOperand(5);
  if (!q || !k || !v || !cu_q) return false;
  const auto qd = q->dimensions(), kd = k->dimensions(), vd = v->dimensions();
  const std::optional<DType> dtype = KernelDType(q->element_type());
  if (!dtype || qd.size() != 4 || kd.size() != 4 || vd.size() != 4) {
    reader.Complain("q, k and v should be float32, bfloat16 or float16 arrays of rank 4, but are " +
                    ToString(*q) + ", " + ToString(*k) + " and " + ToString(*v));
    return false;
  }
  const int64_t sequences =
      cu_q->element_count() > 0 ? static_cast<int64_t>(cu_q->element_count()) - 1 : qd[0];
  *problem = {*dtype,
              qd[0],
              sequences,
              qd[1],
              kd[1],
              qd[2],
              kd[2],
              qd[3],
              vd[3],
              attributes.scale,
              attributes.soft_cap,
              attributes.window_left,
              attributes.window_right,
              attributes.bottom_right,
              attributes.deterministic,
              attributes.mask_mod};
  reader.Complain(CheckProblem(*problem));
  layout->dtype = q->element_type();
  layout->q = {qd[0], qd[1], qd[2], qd[3]};
  layout->k = {qd[0], kd[1], kd[2], qd[3]};
  layout->v = {qd[0], kd[1], kd[2], vd[3]};
  layout->out = {qd[0], qd[1], qd[2], vd[3]};
  layout->lse = {qd[0], qd[1], qd[2]};
  layout->sinks = {sequences, qd[2]};
  return reader.ok();
}

// The operands both operations share; Params is FwdParams or BwdParams.
template <typename Params>
bool ReadInputs(Reader& reader, const Attributes& attributes, Params* params, Layout* layout) {
  if (!ReadExtents(reader, attributes, &params->problem, layout)) return false;
  const Problem& p = params->problem;
  const auto ints = [&](const char* name, const Shape& shape) {
    return static_cast<const int32_t*>(reader.NextOptional(name, ffi::DataType::S32, shape));
  };
  params->q = reader.Next("q", layout->dtype, layout->q);
  params->k = reader.Next("k", layout->dtype, layout->k);
  params->v = reader.Next("v", layout->dtype, layout->v);
  params->extras.q_lengths = ints("q_lengths", {p.num_sequences});
  params->extras.kv_lengths = ints("kv_lengths", {p.num_sequences});
  params->extras.cu_seqlens_q = ints("cu_seqlens_q", {p.num_sequences + 1});
  params->extras.cu_seqlens_k = ints("cu_seqlens_k", {p.num_sequences + 1});
  params->extras.q_segments = ints("q_segments", {p.batch, p.q_len});
  params->extras.kv_segments = ints("kv_segments", {p.batch, p.kv_len});
  params->extras.q_offset = ints("q_offset", {p.num_sequences});
  params->extras.sinks =
      static_cast<const float*>(reader.NextOptional("sinks", ffi::DataType::F32, layout->sinks));
  return reader.ok();
}

// Calls visit(name, field, is_required) for every attribute.
template <typename Visit>
void VisitAttributes(Attributes& attributes, Visit&& visit) {
  visit("scale", attributes.scale, true);
  visit("soft_cap", attributes.soft_cap, true);
  visit("window_left", attributes.window_left, true);
  visit("window_right", attributes.window_right, true);
  visit("bottom_right", attributes.bottom_right, true);
  visit("deterministic", attributes.deterministic, true);
  visit("mask_mod", attributes.mask_mod, false);
}

template <size_t n>
void Append(const char* const (&names)[n], std::vector<std::string>* out) {
  out->insert(out->end(), names, names + n);
}

template <size_t n>
std::vector<std::string> Names(const char* const (&names)[n]) {
  std::vector<std::string> out;
  Append(names, &out);
  return out;
}

Signature SignatureOf(bool backward) {
  if (!backward) {
    return {"jax_fa forward", Names(kInputs), Names(kForwardOutputs), Names(kForwardScratch),
            false};
  }
  std::vector<std::string> operands = Names(kInputs);
  Append(kBackwardInputs, &operands);
  return {"jax_fa backward", operands, Names(kBackwardOutputs), Names(kBackwardScratch), true};
}

}  // namespace

ffi::ErrorOr<FwdParams> ForwardParams(const ffi::RemainingArgs& args,
                                      const ffi::RemainingRets& rets, const Attributes& attributes,
                                      Platform platform) {
  Reader reader(args, rets, SignatureOf(false), platform);
  FwdParams params{};
  Layout layout;
  if (!ReadInputs(reader, attributes, &params, &layout)) return ffi::Unexpected(reader.error());
  reader.ReadResults();
  params.out = reader.Next("out", layout.dtype, layout.out);
  params.lse = static_cast<float*>(reader.Next("lse", ffi::DataType::F32, layout.lse));
  if (reader.has_scratch()) {
    FwdScratch& scratch = params.scratch;
    scratch.num_splits = reader.PeekExtent();
    if (scratch.num_splits < 2 || scratch.num_splits > kMaxSplits) {
      reader.Complain("out_parts should have 2 to " + std::to_string(kMaxSplits) +
                      " parts, but has " + std::to_string(scratch.num_splits));
      return ffi::Unexpected(reader.error());
    }
    const std::vector<ScratchArray> arrays = ForwardScratch(params.problem, scratch.num_splits);
    scratch.out_parts = reader.Next(arrays[0]);
    scratch.lse_parts = reader.Next(arrays[1]);
  }
  if (reader.ok()) reader.Complain(CheckArrays(params));
  if (!reader.ok()) return ffi::Unexpected(reader.error());
  return params;
}

ffi::ErrorOr<BwdParams> BackwardParams(const ffi::RemainingArgs& args,
                                       const ffi::RemainingRets& rets, const Attributes& attributes,
                                       Platform platform) {
  Reader reader(args, rets, SignatureOf(true), platform);
  BwdParams params{};
  Layout layout;
  if (!ReadInputs(reader, attributes, &params, &layout)) return ffi::Unexpected(reader.error());
  params.out = reader.Next("out", layout.dtype, layout.out);
  params.lse = static_cast<const float*>(reader.Next("lse", ffi::DataType::F32, layout.lse));
  params.dout = reader.Next("dout", layout.dtype, layout.out);
  params.dlse =
      static_cast<const float*>(reader.NextOptional("dlse", ffi::DataType::F32, layout.lse));
  reader.ReadResults();
  params.dq = reader.Next("dq", layout.dtype, layout.q);
  params.dk = reader.Next("dk", layout.dtype, layout.k);
  params.dv = reader.Next("dv", layout.dtype, layout.v);
  params.dsinks =
      static_cast<float*>(reader.NextOptional("dsinks", ffi::DataType::F32, layout.sinks));
  if (reader.has_scratch()) {
    const std::vector<ScratchArray> arrays = BackwardScratch(params.problem);
    params.scratch.dq_sum = reader.Next(arrays[0]);
    params.scratch.row_stats = reader.Next(arrays[1]);
    params.scratch.dkv_sums = reader.Next(arrays[2]);
    params.scratch.turns = reader.Next(arrays[3]);
  }
  if (reader.ok()) reader.Complain(CheckArrays(params));
  if (!reader.ok()) return ffi::Unexpected(reader.error());
  return params;
}

std::vector<std::string> OperandNames(bool backward) {
  const Signature signature = SignatureOf(backward);
  std::vector<std::string> names = signature.operands;
  names.insert(names.end(), signature.results.begin(), signature.results.end());
  return names;
}

std::vector<std::string> AttributeNames() {
  std::vector<std::string> names;
  Attributes attributes{};
  VisitAttributes(attributes, [&](const char* name, auto&, bool) { names.push_back(name); });
  return names;
}

}  // namespace jax_fa

namespace xla::ffi {

std::optional<jax_fa::Attributes> AttrDecoding<jax_fa::Attributes>::Decode(
    XLA_FFI_AttrType type, void* attr, DiagnosticEngine& diagnostic) {
  const auto given = AttrDecoding<Dictionary>::Decode(type, attr, diagnostic);
  if (!given) return std::nullopt;
  jax_fa::Attributes attributes{};
  size_t num_known = 0;
  bool ok = true;
  jax_fa::VisitAttributes(attributes, [&](const char* name, auto& field, bool is_required) {
    if (!given->contains(name)) {
      if (is_required) diagnostic.Emit("jax_fa: no attribute ") << name << ". ";
      ok = ok && !is_required;
      return;
    }
    ++num_known;
    const auto value = given->get<std::decay_t<decltype(field)>>(name);
    if (value.has_error()) {
      diagnostic.Emit("jax_fa: attribute ") << name << ": " << value.error().message() << ". ";
      ok = false;
    } else {
      field = *value;
    }
  });
  // A newer program asks for what this library cannot know to be without effect.
  if (given->size() != num_known) {
    diagnostic.Emit("jax_fa: the program was made by a newer release, whose attributes are");
    for (const std::string_view name : *given) diagnostic.Emit(" ") << name;
    ok = false;
  }
  if (!ok) return std::nullopt;
  return attributes;
}

}  // namespace xla::ffi

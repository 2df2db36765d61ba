#include "arguments.h"

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "checks.h"

namespace jax_fa {
namespace {

namespace ffi = ::xla::ffi;

using Shape = std::vector<int64_t>;

// Text is put together without streams: these have crashed in processes that hold another C++
// library besides this extension's (seen with jaxlib 0.11 and GCC 13).
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

using Names = std::vector<std::string>;

// Collects the names of what is visited.
struct Collect {
  Names* names;
  template <typename Pointer>
  void operator()(const Array& array, const Pointer&) const {
    names->push_back(array.name);
  }
};

template <typename Params, typename Visit>
Names NamesOf(const Visit& visit) {
  Names names;
  const Params params{};
  visit(params, Collect{&names});
  return names;
}

template <typename Params>
Names OperandsOf() {
  return NamesOf<Params>([](auto& params, auto&& collect) { Params::Operands(params, collect); });
}

template <typename Params>
Names ResultsOf() {
  return NamesOf<Params>([](auto& params, auto&& collect) { Params::Results(params, collect); });
}

// Without those that calls may lack.
template <typename Params>
Names LeastResultsOf() {
  Names names = ResultsOf<Params>();
  names.resize(Params::kNumResults - Params::kNumAddedResults);
  return names;
}

template <typename Params>
Names AddedResultsOf() {
  const Names names = ResultsOf<Params>();
  return {names.end() - Params::kNumAddedResults, names.end()};
}

template <typename Params>
Names ScratchOf() {
  return NamesOf<Params>([](auto& params, auto&& collect) { Params::Scratch(params, collect); });
}

// Reads buffers by position and remembers the first complaint.
class Reader {
 public:
  Reader(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, const char* title)
      : args_(args), rets_(rets), title_(title) {}

  // Complains unless there are as many operands and results as the operation has. Returns whether
  // scratch is among them.
  template <typename Params>
  bool CheckNumbers(Platform platform) {
    if (args_.size() > Params::kNumOperands ||
        args_.size() < Params::kNumOperands - Params::kNumAddedOperands) {
      Complain("takes " + std::to_string(Params::kNumOperands) + " operands (" +
               Join(OperandsOf<Params>()) + "), but got " + std::to_string(args_.size()));
    }
    constexpr size_t most = Params::kNumResults, least = most - Params::kNumAddedResults;
    static_assert(!Params::kNumAddedResults || !Params::kMayLackScratch, "numbers are ambiguous");
    const bool takes_scratch = platform == Platform::kCuda && Params::kNumScratch > 0;
    const bool takes_added = platform == Platform::kCuda && most > least;
    for (num_results_ = least; num_results_ <= (takes_added ? most : least); ++num_results_) {
      if (takes_scratch && rets_.size() == num_results_ + Params::kNumScratch) return true;
      if (takes_scratch && !Params::kMayLackScratch) continue;
      if (rets_.size() == num_results_) return false;
    }
    std::string expected =
        std::to_string(least) + " results (" + Join(LeastResultsOf<Params>()) + ")";
    if (takes_added) {
      expected += " or " + std::to_string(most) + " (also " + Join(AddedResultsOf<Params>()) + ")";
    }
    if (takes_scratch) {
      expected += std::string(Params::kMayLackScratch ? ", or these and" : " and") +
                  " as scratch " + std::to_string(Params::kNumScratch) + " more (" +
                  Join(ScratchOf<Params>()) + ")";
    }
    Complain("gives " + expected + ", but " + std::to_string(rets_.size()) + " are asked for");
    return false;
  }

  // The element type and the extents that arrays are to have from now on.
  void Expect(ffi::DataType element, const Problem& problem) {
    element_ = element;
    Expect(problem);
  }
  void Expect(const Problem& problem) {
    extents_ = ExtentsOf(problem);
    bias_is_float32_ = problem.bias_bytes == 4;
  }
  // The next operand or result, whose element type and shape must be as expected. Null for one that
  // is absent: without elements, which may also have shape [0], or behind the last of an older
  // program.
  template <typename T>
  void Next(const Array& array, T** pointer) {
    if (!reading_results_ && next_ >= args_.size()) return;
    const std::optional<ffi::AnyBuffer> buffer = Take();
    if (!buffer.has_value() || !Check(*buffer, array)) return;
    if (array.is_optional && buffer->element_count() == 0) return;
    *pointer = static_cast<T*>(buffer->untyped_data());
  }
  // An operand, without a check.
  std::optional<ffi::AnyBuffer> PeekOperand(size_t index) { return Buffer(args_, index); }
  // The shape of an operand that may be absent; then it has none.
  Shape PeekShape(size_t index) {
    if (index >= args_.size()) return {};
    const std::optional<ffi::AnyBuffer> buffer = Buffer(args_, index);
    if (!buffer) return {};
    const Shape shape(buffer->dimensions().begin(), buffer->dimensions().end());
    return shape == Shape{0} ? Shape{} : shape;  // of an empty problem it may have extents of 0
  }
  // Of results, how many are asked for; scratch is behind them.
  size_t num_results() const { return num_results_; }
  // An extent of the first array of scratch; 0 if it has no such dimension.
  int64_t PeekScratchExtent(size_t dimension) const {
    auto buffer = rets_.get<ffi::AnyBuffer>(num_results_);
    const bool has_rank = buffer.has_value() && (*buffer)->dimensions().size() > dimension;
    return has_rank ? (*buffer)->dimensions()[dimension] : 0;
  }
  void ReadResults() {
    reading_results_ = true;
    next_ = 0;
  }
  void Complain(const std::string& what) {
    if (error_.empty()) error_ = std::string(title_) + ": " + what;
  }
  void Complain(const Complaint& complaint) {
    if (complaint) Complain(*complaint);
  }
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
  ffi::DataType TypeOf(const Array& array) const {
    switch (array.element) {
      case Element::kFloat32:
        return ffi::DataType::F32;
      case Element::kInt32:
        return ffi::DataType::S32;
      case Element::kBias:
        return bias_is_float32_ ? ffi::DataType::F32 : element_;
      default:
        return element_;
    }
  }
  // Whether a buffer is what an array should be.
  bool Check(const ffi::AnyBuffer& buffer, const Array& array) {
    const auto got = buffer.dimensions();
    bool fits = got.size() == array.rank;
    for (size_t i = 0; fits && i < array.rank; ++i) fits = got[i] == extents_[array.dims[i]];
    fits = fits || (array.is_optional && got.size() == 1 && got[0] == 0);
    if (fits && buffer.element_type() == TypeOf(array)) return true;
    Shape shape;
    for (size_t i = 0; i < array.rank; ++i) shape.push_back(extents_[array.dims[i]]);
    const std::string type = ToString(TypeOf(array));
    Complain(std::string(array.name) + " should be " + type + ToString(shape) + ", but is " +
             ToString(buffer) +
             (array.is_optional ? " (where there is none, " + type + "[0])" : ""));
    return false;
  }

  const ffi::RemainingArgs& args_;
  const ffi::RemainingRets& rets_;
  const char* title_;
  ffi::DataType element_ = ffi::DataType::INVALID;
  Extents extents_{};
  bool bias_is_float32_ = false;
  size_t num_results_ = 0;
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

// The place of an operand.
template <typename Params>
size_t PlaceOf(const Array& array) {
  const Names names = OperandsOf<Params>();
  return std::find(names.begin(), names.end(), array.name) - names.begin();
}

// The extents of an operand of rank 4 that may be absent.
void ReadExtentsOf(Reader& reader, size_t place, const Array& array,
                   std::initializer_list<int64_t*> extents) {
  const Shape shape = reader.PeekShape(place);
  if (shape.empty()) return;
  if (shape.size() != extents.size()) {
    reader.Complain(std::string(array.name) + " should have rank " +
                    std::to_string(extents.size()) + ", but has shape " + ToString(shape));
    return;
  }
  size_t i = 0;
  for (int64_t* extent : extents) *extent = shape[i++];
}

// Derives the extents from q, k, v, cu_seqlens_q, mask_words and bias; all arrays are checked
// against them.
template <typename Params>
void ReadExtents(Reader& reader, Problem* p) {
  const auto q = reader.PeekOperand(places::q), k = reader.PeekOperand(places::k);
  const auto v = reader.PeekOperand(places::v);
  const auto borders = reader.PeekOperand(places::cu_seqlens_q);
  if (!q || !k || !v || !borders) return;
  const auto qd = q->dimensions(), kd = k->dimensions(), vd = v->dimensions();
  const std::optional<DType> dtype = KernelDType(q->element_type());
  if (!dtype || qd.size() != 4 || kd.size() != 4 || vd.size() != 4) {
    reader.Complain("q, k and v should be float32, bfloat16 or float16 arrays of rank 4, but are " +
                    ToString(*q) + ", " + ToString(*k) + " and " + ToString(*v));
    return;
  }
  p->dtype = *dtype;
  p->batch = qd[0];
  p->num_sequences =
      borders->element_count() > 0 ? static_cast<int64_t>(borders->element_count()) - 1 : qd[0];
  p->q_len = qd[1];
  p->kv_len = kd[1];
  p->num_q_heads = qd[2];
  p->num_kv_heads = kd[2];
  p->head_dim = qd[3];
  p->value_dim = vd[3];
  static const size_t mask_words = PlaceOf<Params>(arrays::mask_words);
  static const size_t bias = PlaceOf<Params>(arrays::bias);
  ReadExtentsOf(reader, mask_words, arrays::mask_words,
                {&p->mask_batch, &p->mask_heads, &p->mask_rows, &p->mask_width});
  ReadExtentsOf(reader, bias, arrays::bias,
                {&p->bias_batch, &p->bias_heads, &p->bias_rows, &p->bias_keys});
  if (!reader.PeekShape(bias).empty()) {
    const bool is_float32 = reader.PeekOperand(bias)->element_type() == ffi::DataType::F32;
    p->bias_bytes = is_float32 || *dtype == DType::kF32 ? 4 : 2;  // Next checks the type
  }
  if (reader.ok()) reader.Complain(CheckProblem(*p));
  if (reader.ok()) reader.Expect(q->element_type(), *p);
}

// What only scratch tells. Of a forward: in how many parts the keys are.
void ReadScratchExtents(Reader& reader, FwdParams* params) {
  Problem& p = params->problem;
  p.num_splits = reader.PeekScratchExtent(0);
  if (p.num_splits < 2 || p.num_splits > kMaxSplits) {
    reader.Complain("out_parts should have 2 to " + std::to_string(kMaxSplits) +
                    " parts, but has " + std::to_string(p.num_splits));
    return;
  }
  reader.Expect(p);
}
// Of a backward: the columns of dq_sum, its first array.
void ReadScratchExtents(Reader& reader, BwdParams* params) {
  Problem& p = params->problem;
  p.dq_dim = reader.PeekScratchExtent(arrays::dq_sum.rank - 1);
  if (p.dq_dim < p.head_dim) {
    reader.Complain("dq_sum should have at least the " + std::to_string(p.head_dim) +
                    " columns of q, but has " + std::to_string(p.dq_dim));
    return;
  }
  reader.Expect(p);
}
void ReadScratchExtents(Reader&, DbiasParams*) {}

}  // namespace

template <typename Params>
ffi::ErrorOr<Params> Read(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                          const Attributes& attributes, Platform platform) {
  Reader reader(args, rets, Params::kTitle);
  Params params{};
  params.problem = attributes.problem;
  if (!attributes.problem.mask_mod.empty()) {
    return ffi::Unexpected(
        ffi::Error(ffi::ErrorCode::kUnimplemented,
                   "jax_fa: the program calls kernels that were compiled with the mask function '" +
                       std::string(attributes.problem.mask_mod) +
                       "', which this release has none of; trace it again with mask_mod=function"));
  }
  const bool has_scratch = reader.CheckNumbers<Params>(platform);
  if (reader.ok()) ReadExtents<Params>(reader, &params.problem);
  if (!reader.ok()) return ffi::Unexpected(reader.error());
  const auto next = [&reader](const Array& array, auto*& pointer) { reader.Next(array, &pointer); };
  Params::Operands(params, next);
  reader.ReadResults();
  size_t num_read = 0;
  Params::Results(params, [&](const Array& array, auto*& pointer) {
    if (num_read++ < reader.num_results()) next(array, pointer);
  });
  if constexpr (std::is_same_v<Params, BwdParams>) {
    params.problem.gives_dbias = params.dbias != nullptr;
  }
  if (has_scratch) ReadScratchExtents(reader, &params);
  if (has_scratch && reader.ok()) Params::Scratch(params, next);
  if (reader.ok()) reader.Complain(CheckArrays(params));
  // Programs of early versions may lack scratch that kernels need.
  if (reader.ok() && platform == Platform::kCuda) reader.Complain(CheckScratch(params));
  if (!reader.ok()) return ffi::Unexpected(reader.error());
  return params;
}

template ffi::ErrorOr<FwdParams> Read(const ffi::RemainingArgs&, const ffi::RemainingRets&,
                                      const Attributes&, Platform);
template ffi::ErrorOr<BwdParams> Read(const ffi::RemainingArgs&, const ffi::RemainingRets&,
                                      const Attributes&, Platform);
template ffi::ErrorOr<DbiasParams> Read(const ffi::RemainingArgs&, const ffi::RemainingRets&,
                                        const Attributes&, Platform);

namespace {

template <typename Params>
Names ArraysOf() {
  Names names = OperandsOf<Params>();
  const Names results = ResultsOf<Params>();
  names.insert(names.end(), results.begin(), results.end());
  return names;
}

}  // namespace

Names OperandNames(std::string_view operation) {
  if (operation == FwdParams::kOperation) return ArraysOf<FwdParams>();
  if (operation == BwdParams::kOperation) return ArraysOf<BwdParams>();
  return operation == DbiasParams::kOperation ? ArraysOf<DbiasParams>() : Names{};
}

Names AttributeNames() {
  Names names;
  Problem problem{};
  Problem::Attributes(problem, [&](const char* name, auto&, bool) { names.push_back(name); });
  return names;
}

}  // namespace jax_fa

namespace xla::ffi {
namespace {

std::string_view NameOf(const XLA_FFI_Attrs& attributes, int64_t place) {
  return {attributes.names[place]->ptr, attributes.names[place]->len};
}

}  // namespace

std::optional<jax_fa::KernelName> AttrDecoding<jax_fa::KernelName>::Decode(
    XLA_FFI_AttrType type, void* attr, DiagnosticEngine& diagnostic) {
  const auto given = AttrDecoding<Dictionary>::Decode(type, attr, diagnostic);
  if (!given) return std::nullopt;
  const auto kernel = given->get<std::string_view>("kernel");
  return jax_fa::KernelName{kernel.has_value() ? *kernel : std::string_view()};
}

std::optional<jax_fa::Attributes> AttrDecoding<jax_fa::Attributes>::Decode(
    XLA_FFI_AttrType type, void* attr, DiagnosticEngine& diagnostic) {
  const auto given = AttrDecoding<Dictionary>::Decode(type, attr, diagnostic);
  if (!given) return std::nullopt;
  const auto& all = *static_cast<const XLA_FFI_Attrs*>(attr);
  jax_fa::Attributes attributes{};
  int64_t num_known = 0;
  bool ok = true;
  // Looks each up once and makes no message unless one is due: this runs in every call.
  const auto decode = [&](const char* name, auto& field, bool is_required) {
    int64_t place = 0;
    while (place < all.size && NameOf(all, place) != name) ++place;
    if (place == all.size) {
      if (is_required) diagnostic.Emit("jax_fa: no attribute ") << name << ". ";
      ok = ok && !is_required;
      return;
    }
    ++num_known;
    using Field = std::decay_t<decltype(field)>;
    DiagnosticEngine problem;
    const auto value = AttrDecoding<Field>::Decode(all.types[place], all.attrs[place], problem);
    if (value) {
      field = *value;
    } else {
      diagnostic.Emit("jax_fa: attribute ") << name << ": " << problem.Result() << ". ";
      ok = false;
    }
  };
  jax_fa::Problem::Attributes(attributes.problem, decode);
  // Attributes of a newer program may have an effect that this library knows nothing of.
  if (all.size != num_known) {
    diagnostic.Emit("jax_fa: the program was made by a newer release, whose attributes are");
    for (const std::string_view name : *given) diagnostic.Emit(" ") << name;
    ok = false;
  }
  if (!ok) return std::nullopt;
  return attributes;
}

}  // namespace xla::ffi

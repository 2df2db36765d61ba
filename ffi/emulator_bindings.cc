#include "emulator_bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "emulator_block.h"
#include "emulator_dot.h"

namespace nb = nanobind;

namespace jax_fa {
namespace {

// ---- Matrices -----------------------------------------------------------------------------------

// Shapes and strides are the caller's business.
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using Result = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// a [K, M], b [K, N], addend [M, N] -> sum [M, N]. least_exponents: of the types of a and b.
void MultiplyAddMatrices(const Matrix& a, const Matrix& b, const std::optional<Matrix>& addend,
                         std::pair<int, int> least_exponents, std::pair<int, int> digits_and_cut,
                         const Result& sum) {
  const int64_t rows = a.shape(1), columns = b.shape(1);
  const DotFactors a_factors{a.data(), a.stride(0), rows, least_exponents.first};
  const DotFactors b_factors{b.data(), b.stride(0), columns, least_exponents.second};
  DotAddend own{nullptr, 0};
  if (addend.has_value()) own = {addend->data(), addend->stride(0)};
  const DotRule rule{digits_and_cut.first, digits_and_cut.second};
  MultiplyAdd(a_factors, b_factors, a.shape(0), own, rule, sum.data());
}

// ---- Blocks -------------------------------------------------------------------------------------

// The first fields of PyArrayObject_fields, which numpy's ABI keeps. Reading them costs a fraction
// of what the buffer protocol does; blocks.py checks at import that they are what they seem.
struct NumpyArray {
  PyObject object;
  char* data;
  int rank;
  Py_ssize_t* extents;
  Py_ssize_t* strides;
};

PyTypeObject* array_type = nullptr;

char* DataOf(PyObject* array) { return reinterpret_cast<NumpyArray*>(array)->data; }

// The lanes of a register, or null if the object is no contiguous array of that many.
const char* Lanes(PyObject* object, Py_ssize_t item_bytes) {
  if (object == nullptr || Py_TYPE(object) != array_type) return nullptr;
  const NumpyArray* array = reinterpret_cast<NumpyArray*>(object);
  const bool fits =
      array->rank == 1 && array->extents[0] == kWarpLanes && array->strides[0] == item_bytes;
  return fits ? array->data : nullptr;
}

// A register's value, or one of the two arrays of a pair. Borrowed.
PyObject* PartOf(PyObject* slots, int slot, int part) {
  PyObject* value = PyList_GetItem(slots, slot);
  if (part < 0 || value == nullptr) return value;
  return PyTuple_Check(value) ? PyTuple_GetItem(value, part) : nullptr;
}

// A compiled run of instructions, from and to the list that holds a warp's registers.
class Block {
 public:
  // (slot, part or -1, bytes of an item, offset in scratch)
  using Input = std::tuple<int, int, int, int>;
  // Rows of a new array: (makes the array, bytes of an item, offset in scratch of every row).
  using Group = std::tuple<nb::object, int, std::vector<int>>;
  // Something to be put into slots: (group, row, -1), or (-1, slot, part) that is there already.
  using Leaf = std::tuple<int, int, int>;
  // (slot, leaf, second leaf of a pair or -1)
  using Output = std::tuple<int, int, int>;

  Block(const std::vector<std::tuple<int, int, int, int, int>>& steps, const nb::bytes& scratch,
        std::vector<Input> inputs, std::vector<Group> groups, std::vector<Leaf> leaves,
        std::vector<Output> outputs)
      : scratch_(scratch.c_str(), scratch.c_str() + scratch.size()),
        inputs_(std::move(inputs)),
        groups_(std::move(groups)),
        leaves_(std::move(leaves)),
        outputs_(std::move(outputs)) {
    for (const auto& [operation, to, a, b, c] : steps) {
      steps_.push_back({operation, to, {a, b, c}});
    }
  }

  // False, with nothing done, if a register is not the array that it should be.
  bool Run(const nb::list& slots) {
    for (const auto& [slot, part, item_bytes, offset] : inputs_) {
      const char* lanes = Lanes(PartOf(slots.ptr(), slot, part), item_bytes);
      if (lanes == nullptr) return PyErr_Clear(), false;
      std::memcpy(scratch_.data() + offset, lanes, kWarpLanes * item_bytes);
    }
    RunBlock(steps_, scratch_.data());
    std::vector<nb::object> arrays, found;
    for (const auto& [make, item_bytes, rows] : groups_) {
      arrays.push_back(make());
      char* to = DataOf(arrays.back().ptr());
      const int row_bytes = kWarpLanes * item_bytes;
      for (size_t row = 0; row < rows.size(); ++row) {
        std::memcpy(to + row * row_bytes, scratch_.data() + rows[row], row_bytes);
      }
    }
    found.reserve(leaves_.size());
    for (const auto& [group, place, part] : leaves_) {
      found.push_back(group < 0 ? nb::borrow(PartOf(slots.ptr(), place, part))
                                : nb::steal(PySequence_GetItem(arrays[group].ptr(), place)));
    }
    for (const auto& [slot, first, second] : outputs_) {
      nb::object value = second < 0 ? found[first] : nb::make_tuple(found[first], found[second]);
      PyList_SetItem(slots.ptr(), slot, value.release().ptr());
    }
    return true;
  }

 private:
  std::vector<BlockStep> steps_;
  std::vector<char> scratch_;
  std::vector<Input> inputs_;
  std::vector<Group> groups_;
  std::vector<Leaf> leaves_;
  std::vector<Output> outputs_;
};

// One mma.sync.m16n8k16 of 16-bit factors, from and to the list that holds a warp's registers.
class WarpMultiply {
 public:
  // Slots of the operands and of the result; makes_result: a new array [4, lanes].
  WarpMultiply(std::array<int, 4> a, std::array<int, 2> b, std::array<int, 4> addend,
               std::array<int, 4> result, bool is_bfloat16, std::pair<int, int> digits_and_cut,
               nb::object makes_result)
      : a_(a),
        b_(b),
        addend_(addend),
        result_(result),
        is_bfloat16_(is_bfloat16),
        rule_{digits_and_cut.first, digits_and_cut.second},
        makes_result_(std::move(makes_result)) {}

  // False, with nothing done, if a register is not the array that it should be.
  bool Run(const nb::list& slots) {
    WarpOperands operands;
    operands.is_bfloat16 = is_bfloat16_;
    if (!Find(slots, a_, operands.a) || !Find(slots, b_, operands.b) ||
        !Find(slots, addend_, operands.addend)) {
      return PyErr_Clear(), false;
    }
    const nb::object rows = makes_result_();
    MultiplyFragments(operands, rule_, reinterpret_cast<float*>(DataOf(rows.ptr())));
    for (size_t i = 0; i < result_.size(); ++i) {
      PyList_SetItem(slots.ptr(), result_[i], PySequence_GetItem(rows.ptr(), i));
    }
    return true;
  }

 private:
  template <typename Item, size_t count>
  static bool Find(const nb::list& slots, const std::array<int, count>& numbers,
                   std::array<const Item*, count>& found) {
    for (size_t i = 0; i < count; ++i) {
      const char* lanes = Lanes(PartOf(slots.ptr(), numbers[i], -1), sizeof(Item));
      if (lanes == nullptr) return false;
      found[i] = reinterpret_cast<const Item*>(lanes);
    }
    return true;
  }

  std::array<int, 4> a_;
  std::array<int, 2> b_;
  std::array<int, 4> addend_, result_;
  bool is_bfloat16_;
  DotRule rule_;
  nb::object makes_result_;
};

// ---- Shared memory ------------------------------------------------------------------------------

// Loads from one CTA's shared memory, over the arrays of memory.py's SharedMemory.
class SharedLoads {
 public:
  // written: a byte each, 1 where something was stored. chunk_writes, word_writes: 16 bits for
  // every 16 and every 4 bytes, the asynchronous operations that may still write there.
  SharedLoads(int64_t size, nb::object data, nb::object written, nb::object chunk_writes,
              nb::object word_writes)
      : size_(size),
        data_(std::move(data)),
        written_(std::move(written)),
        chunk_writes_(std::move(chunk_writes)),
        word_writes_(std::move(word_writes)) {}

  // Loads `width` bytes from every offset. False, and `result` is of no use, if that is a fault, or
  // if `offsets` is no array of 32-bit numbers.
  bool Load(nb::handle offsets, int64_t width, nb::handle result) const {
    if (Py_TYPE(offsets.ptr()) != array_type) return false;
    const NumpyArray* array = reinterpret_cast<NumpyArray*>(offsets.ptr());
    if (array->rank != 1 || array->strides[0] != sizeof(uint32_t)) return false;
    const uint32_t* from = reinterpret_cast<const uint32_t*>(array->data);
    const char* data = DataOf(data_.ptr());
    const char* written = DataOf(written_.ptr());
    const uint16_t* chunk_writes = reinterpret_cast<uint16_t*>(DataOf(chunk_writes_.ptr()));
    const uint16_t* word_writes = reinterpret_cast<uint16_t*>(DataOf(word_writes_.ptr()));
    char* to = DataOf(result.ptr());
    for (Py_ssize_t i = 0; i < array->extents[0]; ++i) {
      const int64_t first = from[i], last = first + width - 1;
      if (first % width != 0 || last >= size_) return false;
      if (std::memchr(written + first, 0, width) != nullptr) return false;
      for (int64_t n = first / 16; n <= last / 16; ++n) {
        if (chunk_writes[n] != 0) return false;
      }
      for (int64_t n = first / 4; n <= last / 4; ++n) {
        if (word_writes[n] != 0) return false;
      }
      std::memcpy(to + i * width, data + first, width);
    }
    return true;
  }

 private:
  int64_t size_;
  nb::object data_, written_, chunk_writes_, word_writes_;
};

void SetInterpolation(const std::string& name, std::vector<int64_t> first,
                      std::vector<int64_t> slope, std::vector<int64_t> curve,
                      std::vector<uint16_t> square) {
  int bits = 0;
  while (size_t{1} << bits < square.size()) ++bits;
  Interpolation& table = name == "ex2" ? ex2_table : name == "lg2" ? lg2_table : rcp_table;
  table = {std::move(first), std::move(slope), std::move(curve), std::move(square), bits};
}

// The address of an array's first byte, as Block reads it.
uint64_t AddressOf(nb::handle array) {
  array_type = Py_TYPE(array.ptr());
  return reinterpret_cast<uint64_t>(DataOf(array.ptr()));
}

}  // namespace

void BindEmulator(nb::module_& m) {
  m.def("multiply_add", &MultiplyAddMatrices, nb::arg("a"), nb::arg("b"), nb::arg("addend").none(),
        nb::arg("least_exponents"), nb::arg("digits_and_cut"), nb::arg("sum"));
  m.def("block_operations", &BlockOperations);
  m.def("set_interpolation", &SetInterpolation, nb::arg("name"), nb::arg("first"), nb::arg("slope"),
        nb::arg("curve"), nb::arg("square"));
  m.def("address_of", &AddressOf, nb::arg("array"));
  nb::class_<WarpMultiply>(m, "WarpMultiply")
      .def(nb::init<std::array<int, 4>, std::array<int, 2>, std::array<int, 4>, std::array<int, 4>,
                    bool, std::pair<int, int>, nb::object>(),
           nb::arg("a"), nb::arg("b"), nb::arg("addend"), nb::arg("result"), nb::arg("is_bfloat16"),
           nb::arg("digits_and_cut"), nb::arg("makes_result"))
      .def("run", &WarpMultiply::Run, nb::arg("slots"));
  nb::class_<SharedLoads>(m, "SharedLoads")
      .def(nb::init<int64_t, nb::object, nb::object, nb::object, nb::object>(), nb::arg("size"),
           nb::arg("data"), nb::arg("written"), nb::arg("chunk_writes"), nb::arg("word_writes"))
      .def("load", &SharedLoads::Load, nb::arg("offsets"), nb::arg("width"), nb::arg("result"));
  nb::class_<Block>(m, "Block")
      .def(nb::init<const std::vector<std::tuple<int, int, int, int, int>>&, const nb::bytes&,
                    std::vector<Block::Input>, std::vector<Block::Group>, std::vector<Block::Leaf>,
                    std::vector<Block::Output>>(),
           nb::arg("steps"), nb::arg("scratch"), nb::arg("inputs"), nb::arg("groups"),
           nb::arg("leaves"), nb::arg("outputs"))
      .def("run", &Block::Run, nb::arg("slots"));
}

}  // namespace jax_fa

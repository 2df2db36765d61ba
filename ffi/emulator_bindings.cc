#include "emulator_bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <optional>
#include <stdexcept>
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

// ---- Shared memory ------------------------------------------------------------------------------

// Loads from one CTA's shared memory, over the arrays of memory.py's SharedMemory.
class SharedLoads {
 public:
  SharedLoads(int64_t size, uint32_t base, nb::object data, nb::object written,
              nb::object chunk_writes, nb::object word_writes)
      : arrays_{data, written, chunk_writes, word_writes},
        view_{size,
              base,
              DataOf(data.ptr()),
              DataOf(written.ptr()),
              reinterpret_cast<uint16_t*>(DataOf(chunk_writes.ptr())),
              reinterpret_cast<uint16_t*>(DataOf(word_writes.ptr()))} {}

  // Loads `width` bytes from every offset. False, and `result` is of no use, if that is a fault, or
  // if `offsets` is no array of 32-bit numbers.
  bool Load(nb::handle offsets, int64_t width, nb::handle result) const {
    if (Py_TYPE(offsets.ptr()) != array_type) return false;
    const NumpyArray* array = reinterpret_cast<NumpyArray*>(offsets.ptr());
    if (array->rank != 1 || array->strides[0] != sizeof(uint32_t)) return false;
    const uint32_t* from = reinterpret_cast<const uint32_t*>(array->data);
    char* to = DataOf(result.ptr());
    for (Py_ssize_t i = 0; i < array->extents[0]; ++i) {
      if (!view_.Load(from[i], width, to + i * width)) return false;
    }
    return true;
  }

  const SharedView& view() const { return view_; }

 private:
  std::array<nb::object, 4> arrays_;  // what the view points into
  SharedView view_;
};

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

  // steps: (operation, offset of the result, those of what it reads)
  Block(const std::vector<std::vector<int>>& steps, const nb::bytes& scratch,
        std::vector<Input> inputs, std::vector<Group> groups, std::vector<Leaf> leaves,
        std::vector<Output> outputs)
      : scratch_(scratch.c_str(), scratch.c_str() + scratch.size()),
        inputs_(std::move(inputs)),
        groups_(std::move(groups)),
        leaves_(std::move(leaves)),
        outputs_(std::move(outputs)) {
    for (const std::vector<int>& numbers : steps) {
      BlockStep step{numbers.at(0), numbers.at(1), {}};
      if (numbers.size() > 2 + std::size(step.from)) throw std::invalid_argument("too many operands");
      std::copy(numbers.begin() + 2, numbers.end(), step.from);
      steps_.push_back(step);
    }
  }

  // False, with nothing done, if a register is not the array that it should be, or a load is a fault
  // or not one from `shared`.
  bool Run(const nb::list& slots, const SharedLoads* shared) {
    for (const auto& [slot, part, item_bytes, offset] : inputs_) {
      const char* lanes = Lanes(PartOf(slots.ptr(), slot, part), item_bytes);
      if (lanes == nullptr) return PyErr_Clear(), false;
      std::memcpy(scratch_.data() + offset, lanes, kWarpLanes * item_bytes);
    }
    if (!RunBlock(steps_, scratch_.data(), shared == nullptr ? nullptr : &shared->view())) return false;
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
  nb::class_<SharedLoads>(m, "SharedLoads")
      .def(nb::init<int64_t, uint32_t, nb::object, nb::object, nb::object, nb::object>(),
           nb::arg("size"), nb::arg("base"), nb::arg("data"), nb::arg("written"), nb::arg("chunk_writes"), nb::arg("word_writes"))
      .def("load", &SharedLoads::Load, nb::arg("offsets"), nb::arg("width"), nb::arg("result"));
  nb::class_<Block>(m, "Block")
      .def(nb::init<const std::vector<std::vector<int>>&, const nb::bytes&,
                    std::vector<Block::Input>, std::vector<Block::Group>, std::vector<Block::Leaf>,
                    std::vector<Block::Output>>(),
           nb::arg("steps"), nb::arg("scratch"), nb::arg("inputs"), nb::arg("groups"),
           nb::arg("leaves"), nb::arg("outputs"))
      .def("run", &Block::Run, nb::arg("slots"), nb::arg("shared").none() = nb::none());
}

}  // namespace jax_fa

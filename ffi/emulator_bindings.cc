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

// ---- Memory -------------------------------------------------------------------------------------

// A vector of numbers, or none if the object is no such array.
template <typename Item>
struct Numbers {
  explicit Numbers(nb::handle object) {
    if (Py_TYPE(object.ptr()) != array_type) return;
    const NumpyArray* array = reinterpret_cast<NumpyArray*>(object.ptr());
    if (array->rank != 1 || array->strides[0] != sizeof(Item)) return;
    data = reinterpret_cast<const Item*>(array->data);
    size = array->extents[0];
  }

  const Item* data = nullptr;
  Py_ssize_t size = 0;
};

// Values [addresses, count] that lie one after the other, of so many bytes in all at each address.
struct Rows {
  Rows(nb::handle object, Py_ssize_t count, int64_t bytes) {
    const NumpyArray* array = reinterpret_cast<NumpyArray*>(object.ptr());
    if (Py_TYPE(object.ptr()) != array_type || array->rank != 2) return;
    const Py_ssize_t columns = array->extents[1];
    const bool fits = columns > 0 && array->extents[0] == count && array->strides[0] == bytes &&
                      (columns == 1 || array->strides[1] * columns == bytes);
    if (fits) data = array->data;
  }

  char* data = nullptr;
};

template <typename Item>
Item* ItemsOf(const nb::object& array) {
  return reinterpret_cast<Item*>(DataOf(array.ptr()));
}

// Accesses to one CTA's shared memory, over the arrays of memory.py's SharedMemory. Each gives
// false, with nothing done, if it is a fault or if an argument is no array of the expected numbers.
class SharedCore {
 public:
  // bytes: what is stored, and 1 where something was. chunks: of every 16 bytes the owner, and how
  // many asynchronous operations may still read and write it. word_writes: of every 4 bytes.
  SharedCore(int64_t size, uint32_t base, std::array<nb::object, 2> bytes,
             std::array<nb::object, 3> chunks, nb::object word_writes)
      : bytes_(std::move(bytes)),
        chunks_(std::move(chunks)),
        word_writes_(std::move(word_writes)),
        data_(ItemsOf<char>(bytes_[0])),
        written_(ItemsOf<char>(bytes_[1])),
        owner_(ItemsOf<uint16_t>(chunks_[0])),
        reads_(ItemsOf<uint16_t>(chunks_[1])),
        num_chunks_(reinterpret_cast<NumpyArray*>(chunks_[0].ptr())->extents[0]),
        view_{size,
              base,
              data_,
              written_,
              ItemsOf<uint16_t>(chunks_[2]),
              ItemsOf<uint16_t>(word_writes_)} {}

  // `width` bytes from every offset.
  bool Load(nb::handle offsets, int64_t width, nb::handle result) const {
    const Numbers<uint32_t> from(offsets);
    const Rows to(result, from.size, width);
    if (from.data == nullptr || to.data == nullptr) return false;
    for (Py_ssize_t i = 0; i < from.size; ++i) {
      if (!view_.Load(from.data[i], width, to.data + i * width)) return false;
    }
    return true;
  }

  // Values of `width` bytes to every offset, by a warp's generic stores.
  bool Store(nb::handle offsets, int64_t width, nb::handle values, int warp) {
    const Numbers<uint32_t> to(offsets);
    const Rows from(values, to.size, width);
    if (to.data == nullptr || from.data == nullptr || width > 16) return false;
    for (Py_ssize_t i = 0; i < to.size; ++i) {
      const int64_t first = to.data[i], last = first + width - 1;
      if (first % width != 0 || last >= view_.size) return false;
      if (reads_[first / 16] != 0 || view_.chunk_writes[first / 16] != 0) return false;
      for (int64_t n = first / 4; n <= last / 4; ++n) {
        if (view_.word_writes[n] != 0) return false;
      }
    }
    for (Py_ssize_t i = 0; i < to.size; ++i) {
      std::memcpy(data_ + to.data[i], from.data + i * width, width);
      std::memset(written_ + to.data[i], 1, width);
      owner_[to.data[i] / 16] = static_cast<uint16_t>(warp + 1);
    }
    return true;
  }

  // An asynchronous operation may read chunks from now on, all of which were written.
  bool BeginRead(nb::handle chunks) {
    const Numbers<int64_t> found(chunks);
    if (found.data == nullptr) return false;
    for (Py_ssize_t i = 0; i < found.size; ++i) {
      const int64_t chunk = found.data[i];
      if (chunk < 0 || chunk >= num_chunks_ || owner_[chunk] != 0) return false;
      uint64_t words[3];
      std::memcpy(words, view_.word_writes + 4 * chunk, sizeof(uint64_t));
      std::memcpy(words + 1, written_ + 16 * chunk, 2 * sizeof(uint64_t));
      if (view_.chunk_writes[chunk] != 0 || words[0] != 0) return false;
      if (words[1] != kWritten || words[2] != kWritten) return false;
    }
    for (Py_ssize_t i = 0; i < found.size; ++i) ++reads_[found.data[i]];
    return true;
  }

  // It no longer reads them.
  bool EndRead(nb::handle chunks) {
    const Numbers<int64_t> found(chunks);
    if (found.data == nullptr) return false;
    for (Py_ssize_t i = 0; i < found.size; ++i) --reads_[found.data[i]];
    return true;
  }

  const SharedView& view() const { return view_; }

 private:
  static constexpr uint64_t kWritten = 0x0101010101010101;

  std::array<nb::object, 2> bytes_;  // these keep alive what the others point into
  std::array<nb::object, 3> chunks_;
  nb::object word_writes_;
  char *data_, *written_;
  uint16_t *owner_, *reads_;
  int64_t num_chunks_;
  SharedView view_;
};

// Accesses to global memory, the registered arrays; false as above.
class GlobalCore {
 public:
  void Add(uint64_t base, nb::object data, bool is_writeable) {
    const NumpyArray* array = reinterpret_cast<NumpyArray*>(data.ptr());
    const uint64_t end = base + array->extents[0];
    regions_.push_back({base, end, array->data, is_writeable, std::move(data)});
  }

  bool Load(nb::handle addresses, int64_t width, nb::handle result) const {
    const Numbers<uint64_t> from(addresses);
    const Rows to(result, from.size, width);
    if (from.data == nullptr || to.data == nullptr) return false;
    const Region* region = nullptr;
    for (Py_ssize_t i = 0; i < from.size; ++i) {
      region = Find(from.data[i], width, region);
      if (region == nullptr) return false;
      std::memcpy(to.data + i * width, region->data + (from.data[i] - region->base), width);
    }
    return true;
  }

  bool Store(nb::handle addresses, int64_t width, nb::handle values) const {
    const Numbers<uint64_t> to(addresses);
    const Rows from(values, to.size, width);
    if (to.data == nullptr || from.data == nullptr) return false;
    const Region* region = nullptr;
    for (Py_ssize_t i = 0; i < to.size; ++i) {
      region = Find(to.data[i], width, region);
      if (region == nullptr || !region->is_writeable) return false;
    }
    for (Py_ssize_t i = 0; i < to.size; ++i) {
      region = Find(to.data[i], width, region);
      std::memcpy(region->data + (to.data[i] - region->base), from.data + i * width, width);
    }
    return true;
  }

 private:
  struct Region {
    uint64_t base, end;
    char* data;
    bool is_writeable;
    nb::object array;  // keeps `data` alive
  };

  // The region of an aligned access, null if there is none; most often it is the one before.
  const Region* Find(uint64_t address, uint64_t width, const Region* before) const {
    const auto holds = [&](const Region& region) {
      return address >= region.base && address < region.end && region.end - address >= width;
    };
    const Region* found = before;
    if (found == nullptr || !holds(*found)) {
      const auto place = std::find_if(regions_.begin(), regions_.end(), holds);
      found = place == regions_.end() ? nullptr : &*place;
    }
    return found == nullptr || (address - found->base) % width != 0 ? nullptr : found;
  }

  std::vector<Region> regions_;
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
      if (numbers.size() > 2 + std::size(step.from))
        throw std::invalid_argument("too many operands");
      std::copy(numbers.begin() + 2, numbers.end(), step.from);
      steps_.push_back(step);
    }
  }

  // False, with nothing done, if a register is not the array that it should be, or a load is a
  // fault or not one from `shared`. With a mask, other lanes keep what they have; every leaf then
  // is a row of its own.
  bool Run(const nb::list& slots, const SharedCore* shared, nb::handle mask) {
    for (const auto& [slot, part, item_bytes, offset] : inputs_) {
      const char* lanes = Lanes(PartOf(slots.ptr(), slot, part), item_bytes);
      if (lanes == nullptr) return PyErr_Clear(), false;
      std::memcpy(scratch_.data() + offset, lanes, kWarpLanes * item_bytes);
    }
    if (!RunBlock(steps_, scratch_.data(), shared == nullptr ? nullptr : &shared->view()))
      return false;
    std::vector<nb::object> arrays, found;
    for (const auto& [make, item_bytes, rows] : groups_) {
      arrays.push_back(make());
      char* to = DataOf(arrays.back().ptr());
      const int row_bytes = kWarpLanes * item_bytes;
      for (size_t row = 0; row < rows.size(); ++row) {
        std::memcpy(to + row * row_bytes, scratch_.data() + rows[row], row_bytes);
      }
    }
    if (!mask.is_none() && !KeepOthers(slots, arrays, mask)) return PyErr_Clear(), false;
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
  // Puts what is in the slots written into the lanes outside the mask of the rows that go there.
  bool KeepOthers(const nb::list& slots, const std::vector<nb::object>& arrays,
                  nb::handle mask) const {
    const char* is_in = Lanes(mask.ptr(), 1);
    if (is_in == nullptr) return false;
    const auto keep = [&](int slot, int part, int number) {
      const auto& [group, row, unused] = leaves_[number];
      if (group < 0) return false;
      const int item_bytes = std::get<1>(groups_[group]);
      const char* old = Lanes(PartOf(slots.ptr(), slot, part), item_bytes);
      if (old == nullptr) return false;
      char* to = DataOf(arrays[group].ptr()) + row * kWarpLanes * item_bytes;
      for (int lane = 0; lane < kWarpLanes; ++lane) {
        const int place = lane * item_bytes;
        if (!is_in[lane]) std::memcpy(to + place, old + place, item_bytes);
      }
      return true;
    };
    for (const auto& [slot, first, second] : outputs_) {
      if (!keep(slot, second < 0 ? -1 : 0, first)) return false;
      if (second >= 0 && !keep(slot, 1, second)) return false;
    }
    return true;
  }

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
  nb::class_<SharedCore>(m, "SharedCore")
      .def(nb::init<int64_t, uint32_t, std::array<nb::object, 2>, std::array<nb::object, 3>,
                    nb::object>(),
           nb::arg("size"), nb::arg("base"), nb::arg("bytes"), nb::arg("chunks"),
           nb::arg("word_writes"))
      .def("load", &SharedCore::Load, nb::arg("offsets"), nb::arg("width"), nb::arg("result"))
      .def("store", &SharedCore::Store, nb::arg("offsets"), nb::arg("width"), nb::arg("values"),
           nb::arg("warp"))
      .def("begin_read", &SharedCore::BeginRead, nb::arg("chunks"))
      .def("end_read", &SharedCore::EndRead, nb::arg("chunks"));
  nb::class_<GlobalCore>(m, "GlobalCore")
      .def(nb::init<>())
      .def("add", &GlobalCore::Add, nb::arg("base"), nb::arg("data"), nb::arg("is_writeable"))
      .def("load", &GlobalCore::Load, nb::arg("addresses"), nb::arg("width"), nb::arg("result"))
      .def("store", &GlobalCore::Store, nb::arg("addresses"), nb::arg("width"), nb::arg("values"));
  nb::class_<Block>(m, "Block")
      .def(nb::init<const std::vector<std::vector<int>>&, const nb::bytes&,
                    std::vector<Block::Input>, std::vector<Block::Group>, std::vector<Block::Leaf>,
                    std::vector<Block::Output>>(),
           nb::arg("steps"), nb::arg("scratch"), nb::arg("inputs"), nb::arg("groups"),
           nb::arg("leaves"), nb::arg("outputs"))
      .def("run", &Block::Run, nb::arg("slots"), nb::arg("shared").none() = nb::none(),
           nb::arg("mask") = nb::none());
}

}  // namespace jax_fa

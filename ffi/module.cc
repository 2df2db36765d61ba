// The extension module: what Python may ask of the compiled part, and nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "arguments.h"
#include "attention_cpu.h"
#include "band.h"
#include "checks.h"
#include "emulator_bindings.h"
#include "handlers_cpu.h"
#include "handlers_cuda.h"
#include "record.h"

namespace nb = nanobind;

namespace {

// Raised whenever operands or attributes change; bindings.py refuses another number.
constexpr int kVersion = 1;

nb::capsule Handler(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict Stages(XLA_FFI_Error* (*initialize)(XLA_FFI_CallFrame*),
                XLA_FFI_Error* (*execute)(XLA_FFI_CallFrame*)) {
  nb::dict stages;
  stages["initialize"] = Handler(initialize);
  stages["execute"] = Handler(execute);
  return stages;
}

// platform -> {target name -> handler, or {stage -> handler}}
nb::dict Registrations() {
  nb::dict cpu;
  cpu["jax_fa_fwd_v1"] = Handler(jax_fa::kForwardCpu);
  cpu["jax_fa_bwd_v1"] = Handler(jax_fa::kBackwardCpu);
  nb::dict cuda;
  cuda["jax_fa_fwd_v1"] = Stages(jax_fa::kInitializeForwardCuda, jax_fa::kForwardCuda);
  cuda["jax_fa_bwd_v1"] = Stages(jax_fa::kInitializeBackwardCuda, jax_fa::kBackwardCuda);
  nb::dict platforms;
  platforms["cpu"] = cpu;
  platforms["CUDA"] = cuda;
  return platforms;
}

// The C++ band, for the test that compares it with band.py. window: shift, left, right, q_len,
// kv_len.
std::pair<int64_t, int64_t> KeysOf(const std::vector<int64_t>& window, int64_t row) {
  const jax_fa::Range keys =
      jax_fa::Window{window.at(0), window.at(1), window.at(2), window.at(3), window.at(4)}.KeysOf(
          row);
  return {keys.lo, keys.hi};
}

std::pair<int64_t, int64_t> RowsOf(const std::vector<int64_t>& window, int64_t key) {
  const jax_fa::Range rows =
      jax_fa::Window{window.at(0), window.at(1), window.at(2), window.at(3), window.at(4)}.RowsOf(
          key);
  return {rows.lo, rows.hi};
}

// Scratch of a call as the compiled side expects it, for the test that compares it with abi.py.
// extents: the fields of Problem from batch to value_dim. Of a forward if num_splits is not 0.
nb::list ScratchShapes(const std::vector<int64_t>& extents, bool deterministic,
                       int64_t num_splits) {
  jax_fa::Problem problem{};
  int64_t* const fields[] = {&problem.batch,    &problem.num_sequences, &problem.q_len,
                             &problem.kv_len,   &problem.num_q_heads,   &problem.num_kv_heads,
                             &problem.head_dim, &problem.value_dim};
  for (size_t i = 0; i < std::size(fields); ++i) *fields[i] = extents.at(i);
  problem.scale = 1;
  problem.deterministic = deterministic;
  if (const jax_fa::Complaint complaint = jax_fa::CheckProblem(problem)) {
    throw std::invalid_argument("scratch_shapes: " + *complaint);
  }
  nb::list arrays;
  for (const jax_fa::ScratchArray& array : num_splits > 0
                                               ? jax_fa::ForwardScratch(problem, num_splits)
                                               : jax_fa::BackwardScratch(problem)) {
    arrays.append(nb::make_tuple(array.name, array.shape, array.is_int32 ? "int32" : "float32"));
  }
  return arrays;
}

}  // namespace

NB_MODULE(_jax_fa, m) {
  m.def("version", [] { return kVersion; });
  m.def("registrations", &Registrations);
  m.def("operand_names", &jax_fa::OperandNames, nb::arg("backward"));
  m.def("attribute_names", &jax_fa::AttributeNames);
  m.def("variants", &jax_fa::VariantNames);
  m.def("record", &jax_fa::Record, nb::arg("operation"), nb::arg("capability"), nb::arg("call"),
        nb::arg("num_sms") = 132);  // an H100
  m.def("scratch_shapes", &ScratchShapes, nb::arg("extents"), nb::arg("deterministic"),
        nb::arg("num_splits"));
  m.def("cpu_isa", [] { return std::string(jax_fa::CpuIsa()); });
  m.def("keys_of", &KeysOf, nb::arg("window"), nb::arg("row"));
  m.def("rows_of", &RowsOf, nb::arg("window"), nb::arg("key"));
  jax_fa::BindEmulator(m);
}

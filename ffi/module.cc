// The extension module: what Python may ask of the compiled part, and nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "arguments.h"
#include "attention_cpu.h"
#include "checks.h"
#include "emulator_bindings.h"
#include "handlers_cpu.h"
#include "handlers_cuda.h"
#include "record.h"
#include "schema.h"

namespace nb = nanobind;

namespace {

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
  cpu["jax_fa_dbias_v1"] = Handler(jax_fa::kBiasGradientCpu);
  nb::dict cuda;
  cuda["jax_fa_fwd_v1"] = Stages(jax_fa::kInitializeForwardCuda, jax_fa::kForwardCuda);
  cuda["jax_fa_bwd_v1"] = Stages(jax_fa::kInitializeBackwardCuda, jax_fa::kBackwardCuda);
  cuda["jax_fa_dbias_v1"] = Stages(jax_fa::kInitializeBiasGradientCuda, jax_fa::kBiasGradientCuda);
  nb::dict platforms;
  platforms["cpu"] = cpu;
  platforms["CUDA"] = cuda;
  return platforms;
}

// The C++ band, for the test that compares it with band.py. window: the fields of Window.
jax_fa::Window ToWindow(const std::vector<int64_t>& window) {
  jax_fa::Window result{};
  size_t next = 0;
  jax_fa::Window::Fields(result, [&](const char*, int64_t& x) { x = window.at(next++); });
  return result;
}

std::pair<int64_t, int64_t> KeysOf(const std::vector<int64_t>& window, int64_t row) {
  const jax_fa::Range keys = ToWindow(window).KeysOf(row);
  return {keys.lo, keys.hi};
}

std::pair<int64_t, int64_t> RowsOf(const std::vector<int64_t>& window, int64_t key) {
  const jax_fa::Range rows = ToWindow(window).RowsOf(key);
  return {rows.lo, rows.hi};
}

// Scratch of a call as the compiled side expects it, for the test that compares it with scratch.py.
// extents: the fields of Problem from batch on. Of a forward if num_splits is not 0, else of a
// backward whose kernel is for D = dq_dim.
nb::list ScratchShapes(const std::vector<int64_t>& extents, bool deterministic, int32_t window_left,
                       int32_t window_right, int64_t num_splits, int64_t dq_dim) {
  jax_fa::Problem problem{};
  size_t next = 0;
  jax_fa::Problem::Extents(problem, [&](const char*, int64_t& x) { x = extents.at(next++); });
  problem.scale = 1;
  problem.deterministic = deterministic;
  problem.window_left = window_left;
  problem.window_right = window_right;
  problem.num_splits = num_splits;
  problem.dq_dim = dq_dim;
  if (const jax_fa::Complaint complaint = jax_fa::CheckProblem(problem)) {
    throw std::invalid_argument("scratch_shapes: " + *complaint);
  }
  nb::list arrays;
  const auto append = [&, letters = jax_fa::ExtentsOf(problem)](const jax_fa::Array& array, auto&) {
    std::vector<int64_t> shape;
    for (size_t i = 0; i < array.rank; ++i) shape.push_back(letters[array.dims[i]]);
    const bool is_int32 = array.element == jax_fa::Element::kInt32;
    arrays.append(nb::make_tuple(array.name, shape, is_int32 ? "int32" : "float32"));
  };
  const jax_fa::FwdParams forward{};
  const jax_fa::BwdParams backward{};
  num_splits > 0 ? jax_fa::FwdParams::Scratch(forward, append)
                 : jax_fa::BwdParams::Scratch(backward, append);
  return arrays;
}

}  // namespace

NB_MODULE(_jax_fa, m) {
  m.def("version", [] { return jax_fa::kVersion; });
  m.def("registrations", &Registrations);
  m.def("operand_names", &jax_fa::OperandNames, nb::arg("operation"));
  m.def("attribute_names", &jax_fa::AttributeNames);
  m.def("variants", &jax_fa::VariantNames);
  m.def("record", &jax_fa::Record, nb::arg("operation"), nb::arg("capability"), nb::arg("call"),
        nb::arg("num_sms") = 132);  // an H100
  m.def("scratch_shapes", &ScratchShapes, nb::arg("extents"), nb::arg("deterministic"),
        nb::arg("window_left"), nb::arg("window_right"), nb::arg("num_splits"), nb::arg("dq_dim"));
  m.def("cpu_isa", [] { return std::string(jax_fa::CpuIsa()); });
  m.def("keys_of", &KeysOf, nb::arg("window"), nb::arg("row"));
  m.def("rows_of", &RowsOf, nb::arg("window"), nb::arg("key"));
  jax_fa::BindEmulator(m);
}

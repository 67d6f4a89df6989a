// The Python module rewy._C: importing it registers the operators of ops.cpp. Its functions tell the shape rules of
// PyTorch how much the forward keeps.
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <exception>

#include "rewy/rewy.h"
#include "saved.h"

namespace {

using namespace rewy;

/// What `compute` returns, or Python's exception for what it throws.
template <class Compute>
PyObject* answer(Compute&& compute) {
  try {
    return PyLong_FromLongLong(compute());
  } catch (const Error& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

/// saved_bytes_of_chunk(op, K, V, dtype, policy, device, backend): bytes kept of one chunk of one head.
PyObject* saved_bytes_of_chunk(PyObject*, PyObject* arguments) {
  const char *op = nullptr, *dtype = nullptr, *policy = nullptr, *backend = nullptr;
  long long key_width = 0, value_width = 0;
  int cuda_device = -1;
  if (!PyArg_ParseTuple(arguments, "sLLssis", &op, &key_width, &value_width, &dtype, &policy, &cuda_device, &backend)) {
    return nullptr;
  }
  return answer([&] {
    Problem p{.op = parse_operator(op), .K = key_width, .V = value_width, .dtype = parse_dtype(dtype)};
    p.strength_dtype = p.dtype;  // what is kept does not depend on it
    p.policy = parse_policy(policy);
    Execution execution;
    if (cuda_device >= 0) execution.device = {DeviceKind::kCuda, cuda_device};
    execution.backend = parse_backend(backend);
    return torch_ops::saved_bytes_of_chunk(p, execution);
  });
}

/// activated_bytes_of_token(op, H, HV, K, dtype, gate_dtype, strength_dtype, normalise, activate_gate, activate_beta).
PyObject* activated_bytes_of_token(PyObject*, PyObject* arguments) {
  const char *op = nullptr, *dtype = nullptr, *gate_dtype = nullptr, *strength_dtype = nullptr;
  long long heads = 0, value_heads = 0, key_width = 0;
  int normalise = 0, activate_gate = 0, activate_beta = 0;
  if (!PyArg_ParseTuple(arguments, "sLLLsssppp", &op, &heads, &value_heads, &key_width, &dtype, &gate_dtype,
                        &strength_dtype, &normalise, &activate_gate, &activate_beta)) {
    return nullptr;
  }
  return answer([&] {
    Activation a{.H = heads, .HV = value_heads, .K = key_width};
    a.normalise = normalise != 0;
    a.dtype = parse_dtype(dtype);
    a.gate = activate_gate != 0 ? gate_of(parse_operator(op)) : Gate::kNone;
    a.gate_dtype = parse_dtype(gate_dtype);
    a.strength = activate_beta != 0;
    a.beta_dtype = torch_ops::wide(parse_dtype(strength_dtype));
    return torch_ops::activated_bytes_of_token(a);
  });
}

PyMethodDef methods[] = {
    {"saved_bytes_of_chunk", saved_bytes_of_chunk, METH_VARARGS,
     "saved_bytes_of_chunk(op, K, V, dtype, policy, cuda_device, backend) -> int\n\n"
     "Bytes that the forward keeps of one chunk of one head; cuda_device is -1 on the CPU."},
    {"activated_bytes_of_token", activated_bytes_of_token, METH_VARARGS,
     "activated_bytes_of_token(op, H, HV, K, dtype, gate_dtype, strength_dtype, normalise, activate_gate, "
     "activate_beta) -> int\n\n"
     "Bytes of what activations make of one token."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT,
                      "rewy._C",
                      "Operators of rewy for PyTorch.",
                      -1,
                      methods,
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C(void) {
  PyObject* m = PyModule_Create(&module);
  if (m != nullptr && PyModule_AddStringConstant(m, "version", REWY_VERSION) != 0) {
    Py_DECREF(m);
    return nullptr;
  }
  return m;
}

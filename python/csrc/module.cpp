// The Python module rewy._C: importing it registers the operators of ops.cpp. Its one function tells the shape rules of
// PyTorch how much the forward keeps.
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <exception>

#include "rewy/rewy.h"
#include "saved.h"

namespace {

using namespace rewy;

/// saved_bytes_of_chunk(op, K, V, dtype, policy, device, backend): bytes kept of one chunk of one head.
PyObject* saved_bytes_of_chunk(PyObject*, PyObject* arguments) {
  const char *op = nullptr, *dtype = nullptr, *policy = nullptr, *backend = nullptr;
  long long key_width = 0, value_width = 0;
  int cuda_device = -1;
  if (!PyArg_ParseTuple(arguments, "sLLssis", &op, &key_width, &value_width, &dtype, &policy, &cuda_device, &backend)) {
    return nullptr;
  }
  try {
    Problem p{.op = parse_operator(op), .K = key_width, .V = value_width, .dtype = parse_dtype(dtype)};
    p.strength_dtype = p.dtype;  // what is kept does not depend on it
    p.policy = parse_policy(policy);
    Execution execution;
    if (cuda_device >= 0) execution.device = {DeviceKind::kCuda, cuda_device};
    execution.backend = parse_backend(backend);
    return PyLong_FromLongLong(torch_ops::saved_bytes_of_chunk(p, execution));
  } catch (const Error& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyMethodDef methods[] = {{"saved_bytes_of_chunk", saved_bytes_of_chunk, METH_VARARGS,
                          "saved_bytes_of_chunk(op, K, V, dtype, policy, cuda_device, backend) -> int\n\n"
                          "Bytes that the forward keeps of one chunk of one head; cuda_device is -1 on the CPU."},
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

// The Python module rewy._C: importing it registers the operators of ops.cpp. Its functions tell the shape rules of
// PyTorch how much the forward keeps.
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <exception>

#include "options.h"
#include "rewy/rewy.h"
#include "saved.h"

namespace {

using namespace rewy;
using torch_ops::Options;

/// What `compute` returns, or Python's exception for what it throws.
template <class Compute>
PyObject* answer(Compute&& compute) {
  try {
    return compute();
  } catch (const Error& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyObject* saved_bytes_of_chunk(PyObject*, PyObject* arguments) {
  const char *op = nullptr, *dtype = nullptr, *words = nullptr;
  long long key_width = 0, value_width = 0;
  int cuda_device = -1;
  if (!PyArg_ParseTuple(arguments, "sLLsis", &op, &key_width, &value_width, &dtype, &cuda_device, &words)) {
    return nullptr;
  }
  return answer([&] {
    const Options options = Options::parse(words, op);
    Problem p{.op = parse_operator(op), .K = key_width, .V = value_width, .dtype = parse_dtype(dtype)};
    p.strength_dtype = p.dtype;  // what is kept does not depend on it
    if (options.policy) p.policy = *options.policy;
    Execution execution;
    if (cuda_device >= 0) execution.device = {DeviceKind::kCuda, cuda_device};
    execution.backend = options.backend;
    return PyLong_FromLongLong(torch_ops::saved_bytes_of_chunk(p, execution));
  });
}

PyObject* activated_bytes_of_token(PyObject*, PyObject* arguments) {
  const char *op = nullptr, *dtype = nullptr, *gate_dtype = nullptr, *strength_dtype = nullptr, *words = nullptr;
  long long heads = 0, value_heads = 0, key_width = 0;
  if (!PyArg_ParseTuple(arguments, "sLLLssss", &op, &heads, &value_heads, &key_width, &dtype, &gate_dtype,
                        &strength_dtype, &words)) {
    return nullptr;
  }
  return answer([&] {
    const Options options = Options::parse(words, op);
    Activation a{.H = heads, .HV = value_heads, .K = key_width};
    a.normalise = options.normalise;
    a.dtype = parse_dtype(dtype);
    a.gate = options.gate(parse_operator(op));
    a.gate_dtype = parse_dtype(gate_dtype);
    a.strength = options.strength(parse_operator(op));
    a.beta_dtype = torch_ops::wide(parse_dtype(strength_dtype));
    return PyLong_FromLongLong(torch_ops::activated_bytes_of_token(a));
  });
}

PyObject* keeps(PyObject*, PyObject* arguments) {
  const char *op = nullptr, *words = nullptr;
  if (!PyArg_ParseTuple(arguments, "ss", &op, &words)) return nullptr;
  return answer([&] {
    const Options options = Options::parse(words, op);
    return Py_BuildValue("(NN)", PyBool_FromLong(options.keeps_saved()),
                         PyBool_FromLong(options.keeps_activated(parse_operator(op))));
  });
}

PyMethodDef methods[] = {
    {"keeps", keeps, METH_VARARGS,
     "keeps(op, options) -> tuple[bool, bool]\n\n"
     "Whether the forward keeps bytes for its backward: saved, activated."},
    {"saved_bytes_of_chunk", saved_bytes_of_chunk, METH_VARARGS,
     "saved_bytes_of_chunk(op, K, V, dtype, cuda_device, options) -> int\n\n"
     "Bytes that the forward keeps of one chunk of one head; cuda_device is -1 on the CPU."},
    {"activated_bytes_of_token", activated_bytes_of_token, METH_VARARGS,
     "activated_bytes_of_token(op, H, HV, K, dtype, gate_dtype, strength_dtype, options) -> int\n\n"
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
  if (m != nullptr && (PyModule_AddStringConstant(m, "version", REWY_VERSION) != 0 ||
                       PyModule_AddIntConstant(m, "chunk", rewy::kChunk) != 0)) {
    Py_DECREF(m);
    return nullptr;
  }
  return m;
}

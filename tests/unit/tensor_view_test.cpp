#include "rewy/tensor_view.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "rewy/dlpack.h"

namespace rewy {
namespace {

using Shape = std::vector<std::int64_t>;
using Four = std::array<std::int64_t, 4>;

std::string message(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST(TensorView, DefaultIsNotGiven) {
  const TensorView none;
  EXPECT_FALSE(none.given());
  EXPECT_EQ(none.elements(), 0);
  EXPECT_TRUE(none.dims().empty());
}

TEST(TensorView, ContiguousStrides) {
  float x = 0;
  const TensorView t(&x, DType::kBF16, {2, 3, 5, 7}, {DeviceKind::kCuda, 1});
  EXPECT_EQ(t.data, &x);
  EXPECT_EQ(t.rank, 4);
  EXPECT_EQ(t.strides, (Four{105, 35, 7, 1}));
  EXPECT_EQ(t.elements(), 210);
  EXPECT_EQ(t.device, (Device{DeviceKind::kCuda, 1}));
  EXPECT_EQ(TensorView(&x, DType::kF32, {4}).strides, (Four{1, 0, 0, 0}));
}

TEST(TensorView, EmptyIsGiven) {
  const TensorView t(nullptr, DType::kF32, {1, 0, 2, 8});
  EXPECT_TRUE(t.given());
  EXPECT_EQ(t.elements(), 0);
}

TEST(TensorView, AnyStrides) {
  const Shape shape{2, 3}, strides{-1, 0};
  const TensorView t(nullptr, DType::kF32, shape, strides);
  EXPECT_EQ(t.strides, (Four{-1, 0, 0, 0}));
}

TEST(TensorView, Refusals) {
  EXPECT_EQ(message([] { TensorView(nullptr, DType::kF32, std::span<const std::int64_t>()); }),
            "tensor view: argument 'shape': expected 1 to 4 axes, got 0");
  EXPECT_EQ(message([] {
              TensorView(nullptr, DType::kF32, {1, 1, 1, 1, 1});
            }),
            "tensor view: argument 'shape': expected 1 to 4 axes, got 5");
  EXPECT_EQ(message([] {
              TensorView(nullptr, DType::kF32, {1, -2});
            }),
            "tensor view: argument 'shape': expected no negative extent, got [1, -2]");
  const Shape shape{2, 3}, strides{1};
  EXPECT_EQ(message([&] { TensorView(nullptr, DType::kF32, shape, strides); }),
            "tensor view: argument 'strides': expected 2 strides, got 1");
}

TEST(TensorView, ShapeText) {
  EXPECT_EQ(shape_text({}), "[]");
  EXPECT_EQ(shape_text(Shape{1, 64, 2, 128}), "[1, 64, 2, 128]");
}

TEST(DLPack, RoundTrip) {
  double x[64] = {};
  const Shape shape{2, 3, 4}, strides{1, -2, 12};
  for (DType type : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16, DType::kI32, DType::kI64}) {
    for (Device device : {Device{}, Device{DeviceKind::kCuda, 3}}) {
      TensorView t(&x[8], type, shape, strides, device);
      const DLTensor d = to_dlpack(t);
      EXPECT_EQ(d.dtype.bits, 8 * size_of(type));
      EXPECT_EQ(d.dtype.lanes, 1);
      EXPECT_EQ(d.byte_offset, 0u);
      const TensorView back = from_dlpack(d);
      EXPECT_EQ(back.data, t.data);
      EXPECT_EQ(back.dtype, t.dtype);
      EXPECT_EQ(back.device, t.device);
      EXPECT_EQ(back.rank, 3);
      EXPECT_EQ(back.shape, t.shape);
      EXPECT_EQ(back.strides, t.strides);
    }
  }
}

TEST(DLPack, OffsetAndNullStrides) {
  float x[24] = {};
  TensorView t(x, DType::kF32, {2, 3});
  DLTensor d = to_dlpack(t);
  d.byte_offset = 8;
  d.strides = nullptr;
  const TensorView back = from_dlpack(d);
  EXPECT_EQ(back.data, &x[2]);
  EXPECT_EQ(back.strides, (Four{3, 1, 0, 0}));
  d.data = nullptr;
  EXPECT_EQ(from_dlpack(d).data, nullptr);  // an empty tensor; an offset from null would be an address
}

TEST(DLPack, Refusals) {
  float x[24] = {};
  TensorView t(x, DType::kF32, {2, 3});
  const DLTensor good = to_dlpack(t);
  const auto refusal = [&](const std::function<void(DLTensor&)>& change) {
    DLTensor d = good;
    change(d);
    return message([&] { from_dlpack(d, "q"); });
  };
  EXPECT_EQ(refusal([](DLTensor&) {}), "");
  EXPECT_EQ(refusal([](DLTensor& d) { d.ndim = 0; }), "from_dlpack: argument 'q': expected 1 to 4 axes, got 0");
  EXPECT_EQ(refusal([](DLTensor& d) { d.ndim = 5; }), "from_dlpack: argument 'q': expected 1 to 4 axes, got 5");
  EXPECT_EQ(refusal([](DLTensor& d) { d.dtype.lanes = 4; }),
            "from_dlpack: argument 'q': expected scalar elements (lanes = 1), got 4 lanes");
  EXPECT_EQ(refusal([](DLTensor& d) {
              d.dtype = {kDLUInt, 8, 1};
            }),
            "from_dlpack: argument 'q': expected f64, f32, bf16, f16, i32 or i64, got type code 1 of 8 bits");
  EXPECT_EQ(refusal([](DLTensor& d) { d.device.device_type = kDLMetal; }),
            "from_dlpack: argument 'q': expected a CPU or CUDA tensor, got DLPack device type 8");
}

}  // namespace
}  // namespace rewy

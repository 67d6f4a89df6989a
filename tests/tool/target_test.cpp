// Devices by name, and the case list on a GPU. No device is touched.
#include "target.h"

#include <gtest/gtest.h>

#include "properties.h"

namespace rewy::tool {
namespace {

const Device kGpu{DeviceKind::kCuda, 0};

Case on_gpu(const std::string& text) {
  return for_device(parse_case(text), kGpu);
}

TEST(Target, ReadsDevices) {
  EXPECT_EQ(parse_device("cuda"), kGpu);
  EXPECT_EQ(parse_device("cuda:3"), (Device{DeviceKind::kCuda, 3}));
  for (const char* word : {"auto", "cpu", "reference"}) EXPECT_EQ(parse_device(word), Device{});
  for (const char* word : {"cuda:", "cuda:x", "cuda:-1", "cuda:1x", "cuda:99999999999"}) {
    EXPECT_THROW(parse_device(word), Error) << word;
  }
  EXPECT_EQ(device_text(parse_device("cuda:3")), "cuda:3");
  EXPECT_EQ(device_text({}), "cpu");
}

TEST(Target, MapsCasesToSixteenBits) {
  EXPECT_EQ(on_gpu("op=kda T=5 H=1 K=8"), parse_case("op=kda T=5 H=1 K=8 dtype=bf16"));
  EXPECT_EQ(on_gpu("op=kda T=5 H=1 K=8 dtype=f16"), parse_case("op=kda T=5 H=1 K=8 dtype=f16"));
  EXPECT_EQ(on_gpu("op=gdn T=5 H=1 K=8 strength_dtype=f16").problem.strength_dtype, DType::kF16);
  EXPECT_EQ(on_gpu("op=gdn2 T=5 H=1 K=8").problem.strength_dtype, DType::kBF16);
  EXPECT_EQ(on_gpu("op=gdn2 T=5 H=1 K=8 dtype=f16 strength_dtype=bf16").problem.strength_dtype, DType::kF16);
  EXPECT_EQ(on_gpu("op=kda T=5 H=1 K=8 dtype=f64").problem.dtype, DType::kF64);
  const Case c = parse_case("op=gdn2 T=5 H=1 K=8");
  EXPECT_EQ(for_device(c, {}), c);
  EXPECT_EQ(for_device(on_gpu("op=gdn2 T=5 H=1 K=8"), kGpu), on_gpu("op=gdn2 T=5 H=1 K=8"));
}

TEST(Target, KnowsWhatAGpuDeclines) {
  using Kind = Service::Kind;
  const auto kind = [](const std::string& text) { return service(on_gpu(text), kGpu).kind; };
  EXPECT_EQ(kind("op=kda T=5 H=1 K=256 V=8"), Kind::kServed);
  EXPECT_EQ(kind("op=kda T=0 packed=none H=1 HV=8 K=72 dtype=f16 gate=reset"), Kind::kServed);
  for (const char* text : {"K=60", "K=64 V=3", "K=264", "K=8 V=512", "K=8 dtype=f64", "K=8 graph=expanded",
                           "K=8 intra=pairwise", "K=8 gram=off"}) {
    EXPECT_EQ(kind("op=kda T=5 H=1 " + std::string(text)), Kind::kDeclined) << text;
    EXPECT_FALSE(service(on_gpu(text), kGpu).reason.empty());
    EXPECT_EQ(service(parse_case(text), {}).kind, Kind::kServed);
  }
  EXPECT_EQ(kind("op=kda T=5 H=1 K=8 strides=odd"), Kind::kMayDecline);
  EXPECT_EQ(kind("op=kda T=5 H=1 K=8 strides=packed"), Kind::kServed);
  const Data cut = make_data(on_gpu("op=gdn2 B=2 T=5 H=1 HV=2 K=24 V=40 strides=packed"));
  for (const Tensor* t : {&cut.q, &cut.v, &cut.g, &cut.b, &cut.w}) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(t->view.data) % 16, 0u);
    EXPECT_GT(t->view.strides[1], t->view.shape[2] * t->view.shape[3]);
    for (int axis = 0; axis < 3; ++axis) {
      const auto stride = t->view.strides[static_cast<std::size_t>(axis)];
      EXPECT_EQ(stride * static_cast<std::int64_t>(size_of(t->view.dtype)) % 16, 0);
    }
  }
}

// Token by token a GPU computes in FP32, whatever the types, strides and V.
TEST(Target, TokenByTokenCasesStayAsTheyAre) {
  using Kind = Service::Kind;
  for (const char* text :
       {"K=8", "K=3 V=1000", "K=256 dtype=f16 strength_dtype=bf16", "K=8 strides=packed", "K=8 strides=odd"}) {
    const Case c = token_case(parse_case("op=gdn2 T=5 H=1 " + std::string(text)));
    EXPECT_EQ(for_device(c, kGpu), c) << text;
    EXPECT_EQ(service(c, kGpu).kind, Kind::kServed) << text;
  }
  for (const char* text : {"K=257", "K=8 dtype=f64", "K=8 policy=save", "K=8 gram=off"}) {
    EXPECT_EQ(service(parse_case("op=gdn T=5 H=1 schedule=tokens " + std::string(text)), kGpu).kind, Kind::kDeclined)
        << text;
  }
  EXPECT_EQ(service(parse_case("op=gdn T=5 H=1 K=257 schedule=tokens"), {}).kind, Kind::kServed);
  EXPECT_EQ(service(parse_case("op=gdn T=5 H=1 K=8 schedule=tokens policy=save"), {}).kind, Kind::kDeclined);
}

TEST(Target, PropertiesOfAGpuAreItsOwn) {
  const auto has = [](const std::vector<std::string>& lines, const std::string& line) {
    return std::find(lines.begin(), lines.end(), line) != lines.end();
  };
  const auto gpu = property_lines(kGpu), cpu = property_lines();
  EXPECT_TRUE(has(gpu, "property=capture op=kda") && has(gpu, "property=streams op=gdn2"));
  EXPECT_FALSE(has(cpu, "property=capture op=kda") || has(gpu, "property=graphs op=kda"));
  EXPECT_TRUE(has(gpu, "property=causality op=gdn") && has(cpu, "property=causality op=gdn"));
  EXPECT_TRUE(has(gpu, "property=capture op=kda schedule=tokens") && has(cpu, "property=split op=gdn schedule=tokens"));
  EXPECT_TRUE(has(cpu, "property=policy op=kda") && !has(cpu, "property=policy op=kda schedule=tokens"));
  EXPECT_FALSE(has(gpu, "property=huge op=kda"));  // by name only
  EXPECT_THROW(check_property("property=capture op=kda", {.backend = Backend::kCpu}), Error);
}

}  // namespace
}  // namespace rewy::tool

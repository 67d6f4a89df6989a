// Chunk tables and the rows behind the last offset, against plain loops. Skipped where there is no GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "cuda/kernels.h"
#include "on_device.h"

namespace rewy::cuda {
namespace {

struct Expected {
  std::vector<std::int32_t> first_chunk;
  std::vector<ChunkAt> table;
  std::int64_t begin, end;  // of the used rows
};

Expected expected(const std::vector<std::int64_t>& offsets, std::int64_t T, std::int64_t slots) {
  Expected e;
  std::int64_t before = std::clamp<std::int64_t>(offsets[0], 0, T);
  e.begin = before;
  for (std::size_t s = 0; s + 1 < offsets.size(); ++s) {
    e.first_chunk.push_back(static_cast<std::int32_t>(e.table.size()));
    const std::int64_t now = std::max(before, std::clamp<std::int64_t>(offsets[s + 1], 0, T));
    for (std::int64_t t = before; t < now; t += kChunk) {
      const std::int64_t tokens = std::min(kChunk, now - t);
      e.table.push_back(
          {t, 0, static_cast<std::int32_t>(s), static_cast<std::int32_t>(tokens), t + tokens == now ? 1 : 0});
    }
    before = now;
  }
  e.end = before;
  if (e.table.empty()) e.begin = e.end = T;
  e.first_chunk.push_back(static_cast<std::int32_t>(e.table.size()));
  EXPECT_LE(e.table.size(), static_cast<std::size_t>(slots));
  e.table.resize(static_cast<std::size_t>(slots), {0, 0, 0, 0, 0});
  return e;
}

template <class Offset>
void check_offsets(const std::vector<std::int64_t>& offsets, std::int64_t T, std::int64_t stride = 1) {
  SCOPED_TRACE(std::to_string(offsets.size() - 1) + " sequences, T = " + std::to_string(T));
  const auto N = static_cast<std::int64_t>(offsets.size()) - 1;
  std::vector<Offset> strided(offsets.size() * static_cast<std::size_t>(stride), Offset{-77});
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    strided[i * static_cast<std::size_t>(stride)] = static_cast<Offset>(offsets[i]);
  }
  constexpr std::int32_t HV = 3, K = 16, V = 8, kPad = 8;
  Params p{};
  p.B = 1, p.T = T, p.sequences = N, p.chunks = T / kChunk + std::min(N, T);
  p.H = 1, p.HV = HV, p.K = K, p.V = V;
  p.strength_dtype = DType::kF16;
  p.offsets_are_i64 = sizeof(Offset) == 8, p.offset_stride = stride;
  const OnDevice<Offset> on_device(strided);
  const OnDevice<std::int32_t> first_chunk(std::vector<std::int32_t>(static_cast<std::size_t>(N) + 1, -5));
  const OnDevice<ChunkAt> table(std::vector<ChunkAt>(static_cast<std::size_t>(p.chunks), {-5, -5, -5, -5, -5}));
  p.cu_seqlens = on_device.data();
  p.first_chunk = first_chunk.data();
  p.chunk_table = table.data();

  // Rows of 16-bit ones of H * K or HV * V with a gap behind each token, dg per feature, dbeta with heads outermost.
  const auto ones = [&](std::int64_t row) {
    return std::vector<std::uint16_t>(static_cast<std::size_t>(T * (row + kPad)), 0x3c00);
  };
  const OnDevice<std::uint16_t> dq(ones(K)), dv(ones(HV * V)),
      dbeta(std::vector<std::uint16_t>(std::size_t(HV * T), 1));
  const OnDevice<float> dg(std::vector<float>(static_cast<std::size_t>(T * HV * K), 1.0f));
  p.dq = {dq.data(), 0, K + kPad, 0};
  p.dv = {dv.data(), 0, HV * V + kPad, V};
  p.dbeta = {dbeta.data(), 0, 1, T};
  p.dg = {dg.data(), 0, HV * K, K};

  launch_chunk_table(p, nullptr);
  if (T > 0) launch_zero_tail(p, {Operator::kKda, DType::kBF16}, nullptr);
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");

  const Expected e = expected(offsets, T, p.chunks);
  EXPECT_EQ(first_chunk.values(), e.first_chunk);
  const std::vector<ChunkAt> found = table.values();
  for (std::size_t i = 0; i < found.size(); ++i) {
    const ChunkAt &a = found[i], &b = e.table[i];
    ASSERT_TRUE(a.token == b.token && a.batch == b.batch && a.sequence == b.sequence && a.tokens == b.tokens &&
                a.last == b.last)
        << "slot " << i << ": token " << a.token << " of " << a.sequence << ", " << a.tokens << " tokens";
  }
  // Elements of `row` a token, a token each `token` of them; 1: heads outermost.
  const auto zeroed = [&](const auto& values, std::int64_t token, std::int64_t row) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto at = static_cast<std::int64_t>(i);
      const std::int64_t t = token == 1 ? at % T : at / token;
      const bool element = token == 1 || at % token < row;
      ASSERT_EQ(values[i] == 0, element && (t < e.begin || t >= e.end)) << "element " << i << " of token " << t;
    }
  };
  zeroed(dq.values(), K + kPad, K);
  zeroed(dv.values(), HV * V + kPad, HV * V);
  zeroed(dg.values(), HV * K, HV * K);
  zeroed(dbeta.values(), 1, 1);
}

void check_both(const std::vector<std::int64_t>& offsets, std::int64_t T) {
  check_offsets<std::int32_t>(offsets, T);
  check_offsets<std::int64_t>(offsets, T);
  check_offsets<std::int64_t>(offsets, T, 3);
}

class ChunkTable : public testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    const bool has = cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
    cudaGetLastError();
    if (!has) GTEST_SKIP() << "no GPU";
  }
};

TEST_F(ChunkTable, Small) {
  check_both({0}, 0);
  check_both({0}, 100);
  check_both({0, 0, 0}, 0);
  check_both({0, 0, 0}, 70);
  check_both({0, 64}, 64);
  check_both({0, 1, 1, 64, 65, 65, 300}, 300);
  check_both({0, 0, 63, 128, 1000, 1000}, 1200);
  check_both({0, 5000}, 5001);
}

// Offsets that no host would accept stay inside the tensors.
TEST_F(ChunkTable, Clamped) {
  check_both({0, 200, 100, 150, 300}, 256);
  check_both({-9, -3, 40, 10'000, 20}, 130);
  check_both({70, 90, 200}, 256);
  check_both({500, 600}, 256);
}

TEST_F(ChunkTable, ManySequences) {
  std::mt19937 random(7);
  for (const std::int64_t N : {1023, 1024, 4095, 4096, 4097, 300'000}) {
    std::vector<std::int64_t> offsets{0};
    for (std::int64_t s = 0; s < N; ++s) {
      const auto kind = random() % 8;
      offsets.push_back(offsets.back() + (kind == 0 ? random() % (N > 10'000 ? 70 : 400) : kind < 4 ? 0 : 1));
    }
    check_both(offsets, offsets.back() + 10);
    check_both(offsets, offsets.back() / 2);
  }
}

}  // namespace
}  // namespace rewy::cuda

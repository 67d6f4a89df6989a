#include "bench_device.h"

namespace rewy::tool {
namespace {

std::size_t bytes_of(const Run& run, bool backward) {
  std::size_t bytes = 0;
  for (const Output& output : run.outputs) {
    const bool gradient = output.name != "o" && output.name != "final_state";
    if (gradient == backward) bytes += output.tensor.buffer.size();
  }
  return bytes;
}

}  // namespace

std::vector<DeviceTiming> time_on_device(const Case& c, const RunOptions& how, const std::string& direction,
                                         const TimingOptions& options) {
  const bool tokens = c.schedule == Schedule::kTokens;
  const Data data = make_data(c);
  std::vector<DeviceTiming> all;
  const auto time = [&](PlacedCall& placed, bool backward, bool saved) {
    DeviceTiming t;
    t.direction = backward ? "bwd" : "fwd";
    t.saved = saved;
    t.floor = tokens ? token_floor(c.problem, c.initial_state, c.final_state)
                     : call_floor(c.problem, backward ? Direction::kBackward : Direction::kForward, saved);
    t.seconds = time_replays(
        how.device, *placed.stream(), [&] { backward ? placed.backward() : placed.forward(); }, options);
    const Run& run = placed.described();
    t.backend = run.backend;
    t.kernels = run.kernels;
    t.workspace = backward ? placed.backward_workspace() : placed.forward_workspace();
    t.saved_bytes = saved ? run.forward_bytes.saved : 0;
    t.outputs = bytes_of(run, backward);
    all.push_back(std::move(t));
  };
  if (direction != "bwd" || tokens) {
    RunOptions alone = how;
    alone.schedule = c.schedule;
    alone.backward = false;
    PlacedCall plain(data.call(), alone);
    time(plain, false, false);
  }
  if (tokens) return all;
  PlacedCall training(data.call(), how);
  if (direction != "bwd") time(training, false, true);
  if (direction != "fwd") {
    training.forward();
    time(training, true, true);
  }
  return all;
}

}  // namespace rewy::tool

#include "huge.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <stdexcept>

#include "activations.h"
#include "target.h"

namespace rewy::tool {
namespace {

/// Device tensors of `rows` batch rows each.
class HugeTensors {
 public:
  HugeTensors(const Device& device, std::int64_t rows) : device_(device), rows_(rows) {}

  /// `row` on the host is one batch row, dense; the result holds it in every row.
  TensorView repeated(const TensorView& row) {
    if (!row.given()) return {};
    const std::size_t bytes = bytes_of(row);
    std::byte* to = add(row);
    copy_to_device(to, static_cast<const std::byte*>(row.data), bytes);
    const std::size_t whole = bytes * static_cast<std::size_t>(rows_);
    for (std::size_t done = bytes; done < whole;) {  // doubling what is there
      const std::size_t step = std::min(done, whole - done);
      copy_on_device(to + done, to, step);
      done += step;
    }
    return view(row, to);
  }

  TensorView poisoned(const TensorView& like) { return like.given() ? view(like, add(like)) : TensorView{}; }

  std::span<std::byte> memory(std::size_t bytes) {
    memory_.emplace_back(device_, bytes, Buffer::kPoison);
    return memory_.back().span();
  }

  bool guards_intact() const {
    return std::all_of(memory_.begin(), memory_.end(), [](const DeviceMemory& m) { return m.guards_intact(); });
  }

 private:
  static std::size_t bytes_of(const TensorView& row) {
    return static_cast<std::size_t>(row.elements()) * size_of(row.dtype);
  }

  std::byte* add(const TensorView& row) { return memory(bytes_of(row) * static_cast<std::size_t>(rows_)).data(); }

  TensorView view(const TensorView& row, std::byte* data) const {
    Shape shape(row.dims().begin(), row.dims().end());
    shape[0] = rows_;
    return TensorView(data, row.dtype, shape, device_);
  }

  Device device_;
  std::int64_t rows_;
  std::vector<DeviceMemory> memory_;
};

constexpr std::int64_t kLimit = std::int64_t{1} << 31;

using NamedViews = std::vector<std::pair<std::string, TensorView>>;

/// Rows on both sides of 2^31 elements, and at the ends, against the row alone.
void require_rows(const NamedViews& outputs, std::int64_t rows, std::int64_t elements,
                  const std::function<TensorView(const std::string&)>& alone) {
  const std::int64_t border = kLimit / elements;  // the row that 2^31 elements end in
  for (const std::int64_t index : std::set<std::int64_t>{0, border / 2, border - 1, border, border + 1, rows - 1}) {
    for (const auto& [name, all] : outputs) {
      const TensorView expected = alone(name);
      Tensor got(expected.dtype, Shape(expected.dims().begin(), expected.dims().end()));
      const std::size_t size = got.buffer.size();
      copy_to_host(got.buffer.data(), static_cast<const std::byte*>(all.data) + static_cast<std::size_t>(index) * size,
                   size);
      if (const auto difference = first_difference(got.view, expected)) {
        throw std::runtime_error("batch row " + std::to_string(index) + " of " + std::to_string(rows) +
                                 " against the row alone: " + name + ": " + *difference);
      }
    }
  }
}

}  // namespace

void check_huge(Operator op, const RunOptions& options) {
  const Device device = options.device;
  Case c = parse_case("op=" + std::string(name(op)) + " T=1000 H=16 K=128 h0=1 dht=1 dtype=bf16 gate=mild");
  c.schedule = options.schedule;
  c = for_device(c, device);
  const Data data = make_data(c);
  const Call row = data.call();
  const Run alone = run(row, options);

  const std::int64_t elements = row.in.q.elements();
  Problem p = c.problem;
  p.B = kLimit / elements + 3;
  const DeviceStream stream(device);
  HugeTensors huge(device, p.B);
  const Inputs in{.q = huge.repeated(row.in.q),
                  .k = huge.repeated(row.in.k),
                  .v = huge.repeated(row.in.v),
                  .g = huge.repeated(row.in.g),
                  .beta = huge.repeated(row.in.beta),
                  .b = huge.repeated(row.in.b),
                  .w = huge.repeated(row.in.w),
                  .initial_state = huge.repeated(row.in.initial_state)};
  NamedViews outputs;
  const auto output = [&](const char* name, const TensorView& like) {
    const TensorView view = huge.poisoned(like);
    if (view.given()) outputs.emplace_back(name, view);
    return view;
  };
  Execution execution{
      .device = device, .stream = stream.get(), .schedule = options.schedule, .architecture = options.architecture};
  {
    const Bytes bytes = workspace_bytes(p, Direction::kForward, execution);
    HugeTensors passing(device, p.B);
    execution.workspace = passing.memory(workspace_needed(bytes, false));
    forward(
        p,
        {.in = in, .o = output("o", row.in.v), .final_state = output("final_state", row.in.initial_state), .saved = {}},
        execution);
    stream.synchronize();
    if (!passing.guards_intact()) throw std::runtime_error("wrote past the end of the forward workspace");
  }
  if (options.runs_backward()) {
    const Bytes bytes = workspace_bytes(p, Direction::kBackward, execution);
    execution.workspace = huge.memory(workspace_needed(bytes, false));
    backward(p,
             {.in = in,
              .d_o = huge.repeated(row.d_o),
              .d_final_state = huge.repeated(row.d_final_state),
              .dq = output("dq", row.in.q),
              .dk = output("dk", row.in.k),
              .dv = output("dv", row.in.v),
              .dg = output("dg", row.in.g),
              .dbeta = output("dbeta", row.in.beta),
              .db = output("db", row.in.b),
              .dw = output("dw", row.in.w),
              .d_initial_state = output("dinitial_state", row.in.initial_state),
              .saved = {}},
             execution);
    stream.synchronize();
  }
  if (!huge.guards_intact()) throw std::runtime_error("wrote past the end of a tensor");

  require_rows(outputs, p.B, elements, [&](const std::string& name) { return alone[name]; });
}

void check_huge_activation(Operator op, const Device& device) {
  ActivationCase c;
  Activation& a = c.activation;
  a = {.T = 1000, .H = 16, .HV = 16, .K = 128, .normalise = true, .dtype = DType::kBF16, .gate = gate_of(op)};
  a.gate_dtype = a.strength_dtype = DType::kBF16;
  a.strength = strength_of(op) == Strength::kShared;
  const ActivationData data = make_activation_data(c);
  const std::vector<Output> one = run_activation(data, {.device = device});
  const auto alone = [&](const std::string& name) {
    for (const Output& output : one) {
      if (output.name == name) return output.tensor.view;
    }
    throw std::logic_error("no output " + name);
  };

  const std::int64_t elements = data.raw_q.view.elements();
  a.B = kLimit / elements + 3;
  const DeviceStream stream(device);
  HugeTensors huge(device, a.B);
  NamedViews outputs;
  const auto output = [&](const char* name, bool wanted) {
    if (!wanted) return TensorView{};
    outputs.emplace_back(name, huge.poisoned(alone(name)));
    return outputs.back().second;
  };
  const bool gate = a.gate != Gate::kNone;
  // One for all rows, which HugeTensors would repeat.
  std::vector<DeviceCopy> parameters;
  const auto parameter = [&](const Tensor& t) {
    return t.given() ? parameters.emplace_back(t.view, device).view() : TensorView{};
  };
  Tensor sums[2];
  std::vector<DeviceMemory> device_sums;
  const auto sum = [&](Tensor& to, const char* name) {
    if (!gate) return TensorView{};
    const TensorView& like = alone(name);
    to = Tensor(like.dtype, Shape(like.dims().begin(), like.dims().end()));
    device_sums.emplace_back(device, to.buffer.size(), Buffer::kPoison);
    return TensorView(device_sums.back().data(), like.dtype, like.dims(), device);
  };
  const ActivationInputs in{.raw_q = huge.repeated(data.raw_q.view),
                            .raw_k = huge.repeated(data.raw_k.view),
                            .raw_g = huge.repeated(data.raw_g.view),
                            .A_log = parameter(data.A_log),
                            .dt_bias = parameter(data.dt_bias),
                            .raw_beta = huge.repeated(data.raw_beta.view)};
  Execution execution{.device = device, .stream = stream.get()};
  const ActivateArgs forward{.in = in,
                             .q = output("q", true),
                             .k = output("k", true),
                             .q_rstd = output("q_rstd", true),
                             .k_rstd = output("k_rstd", true),
                             .g = output("g", gate),
                             .beta = output("beta", a.strength)};
  activate(a, forward, execution);
  execution.workspace = huge.memory(activation_workspace_bytes(a, Direction::kBackward, execution));
  activate_backward(a,
                    {.in = in,
                     .q_rstd = forward.q_rstd,
                     .k_rstd = forward.k_rstd,
                     .dq = huge.repeated(data.dq.view),
                     .dk = huge.repeated(data.dk.view),
                     .dg = huge.repeated(data.dg.view),
                     .dbeta = huge.repeated(data.dbeta.view),
                     .d_raw_q = output("d_raw_q", true),
                     .d_raw_k = output("d_raw_k", true),
                     .d_raw_g = output("d_raw_g", gate),
                     .d_A_log = sum(sums[0], "d_A_log"),
                     .d_dt_bias = sum(sums[1], "d_dt_bias"),
                     .d_raw_beta = output("d_raw_beta", a.strength)},
                    execution);
  stream.synchronize();
  if (!huge.guards_intact()) throw std::runtime_error("wrote past the end of a tensor");
  require_rows(outputs, a.B, elements, alone);
  for (std::size_t i = 0; i < device_sums.size(); ++i) {
    copy_to_host(sums[i].buffer.data(), device_sums[i].data(), sums[i].buffer.size());
    const char* name = i == 0 ? "d_A_log" : "d_dt_bias";
    const std::vector<double> row = values(alone(name)), all = values(sums[i].view);
    for (std::size_t j = 0; j < row.size(); ++j) {
      const double expected = static_cast<double>(a.B) * row[j];
      if (std::abs(all[j] - expected) > 0x1p-22 * std::abs(expected)) {
        throw std::runtime_error(std::string(name) + " of " + std::to_string(a.B) +
                                 " equal rows: " + std::to_string(all[j]) + " instead of " + std::to_string(expected));
      }
    }
  }
}

}  // namespace rewy::tool

#include "huge.h"

#include <algorithm>
#include <set>
#include <stdexcept>

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

}  // namespace

void check_huge(Operator op, const Device& device, int architecture) {
  const Case c = for_device(
      parse_case("op=" + std::string(name(op)) + " T=1000 H=16 K=128 h0=1 dht=1 dtype=bf16 gate=mild"), device);
  const Data data = make_data(c);
  const Call row = data.call();
  const Run alone = run(row, {.device = device, .architecture = architecture});

  constexpr std::int64_t kLimit = std::int64_t{1} << 31;
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
  std::vector<std::pair<std::string, TensorView>> outputs;
  const auto output = [&](const char* name, const TensorView& like) {
    const TensorView view = huge.poisoned(like);
    if (view.given()) outputs.emplace_back(name, view);
    return view;
  };
  Execution execution{.device = device, .stream = stream.get(), .architecture = architecture};
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
  if (!huge.guards_intact()) throw std::runtime_error("wrote past the end of a tensor");

  const std::int64_t border = kLimit / elements;  // the row that 2^31 elements end in
  for (const std::int64_t index : std::set<std::int64_t>{0, border / 2, border - 1, border, border + 1, p.B - 1}) {
    for (const auto& [name, all] : outputs) {
      const TensorView& expected = alone[name];
      Tensor got(expected.dtype, Shape(expected.dims().begin(), expected.dims().end()));
      const std::size_t size = got.buffer.size();
      copy_to_host(got.buffer.data(), static_cast<const std::byte*>(all.data) + static_cast<std::size_t>(index) * size,
                   size);
      if (const auto difference = first_difference(got.view, expected)) {
        throw std::runtime_error("batch row " + std::to_string(index) + " of " + std::to_string(p.B) +
                                 " against the row alone: " + name + ": " + *difference);
      }
    }
  }
}

}  // namespace rewy::tool

#include "properties.h"

#include <chrono>
#include <cmath>
#include <limits>
#include <sstream>
#include <stdexcept>

#include "activations.h"
#include "huge.h"
#include "target.h"

namespace rewy::tool {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(what);
}

void require_equal(const std::string& what, const TensorView& a, const TensorView& b) {
  if (const auto difference = first_difference(a, b)) fail(what + ": " + *difference);
}

void require_equal(const std::string& what, const Run& a, const Run& b) {
  for (const Output& output : a.outputs) require_equal(what + ": " + output.name, output.tensor.view, b[output.name]);
}

/// Both are rounded results of the same sums, so the difference of two may be twice what each may be off.
void require_close(const PropertySetting& s, const std::string& what, const std::string& output, const TensorView& a,
                   const TensorView& b) {
  const Comparison c = compare(output, a, b, Keys::kNormal, products_of(s.device, s.schedule));
  if (c.relative > 2 * c.allowed.relative && c.largest > 2 * c.allowed.absolute) {
    fail(what + ": " + output + ": " + c.worst);
  }
}

void require_all(const std::string& what, const TensorView& view, const std::function<bool(double)>& holds) {
  for_each(view, [&](const std::byte* at, const Index& index, std::int64_t) {
    const double x = load_element(at, view.dtype);
    if (!holds(x)) fail(what + ": " + std::to_string(x) + " at " + index_text(index, view.rank));
  });
}

bool is_zero(double x) {
  return x == 0;
}
bool is_finite(double x) {
  return std::isfinite(x);
}

Case parse(const PropertySetting& s, const std::string& rest) {
  Case c = parse_case("op=" + std::string(name(s.op)) + " " + rest);
  c.schedule = s.schedule;
  return for_device(c, s.device);
}

Run run_on(const PropertySetting& s, const Call& call, RunOptions options = {}) {
  options.device = s.device;
  options.architecture = s.architecture;
  options.backend = s.backend;
  options.schedule = s.schedule;
  // Small calls: starting a team costs more than they do, and `determinism` compares the numbers of threads.
  if (options.threads == 0) options.threads = 1;
  return run(call, options);
}

bool forward_alone(const PropertySetting& s) {
  return s.schedule == Schedule::kTokens;
}

bool on_gpu(const PropertySetting& s) {
  return s.device.kind == DeviceKind::kCuda;
}

bool per_token(const std::string& output) {
  return output != "final_state" && output != "dinitial_state";
}

/// The views of a call that have a token axis, with their names.
std::vector<std::pair<std::string, TensorView*>> token_inputs(Call& call) {
  std::vector<std::pair<std::string, TensorView*>> all{{"q", &call.in.q}, {"k", &call.in.k},       {"v", &call.in.v},
                                                       {"g", &call.in.g}, {"beta", &call.in.beta}, {"b", &call.in.b},
                                                       {"w", &call.in.w}};
  std::erase_if(all, [](const auto& input) { return !input.second->given(); });
  return all;
}

/// The call on tokens [begin, begin + count), on its own.
Call tokens(Call call, std::int64_t begin, std::int64_t count) {
  for (auto& [name, view] : token_inputs(call)) *view = slice(*view, 1, begin, count);
  call.d_o = slice(call.d_o, 1, begin, count);
  call.problem.T = count;
  return call;
}

/// A packed call's segment as a call that is not packed.
Call segment(Call call, std::int64_t index, std::int64_t begin, std::int64_t count) {
  call = tokens(call, begin, count);
  call.problem.segments.reset();
  call.in.cu_seqlens = {};
  call.in.initial_state = slice(call.in.initial_state, 0, index, 1);
  call.d_final_state = slice(call.d_final_state, 0, index, 1);
  return call;
}

// ---- Bits that must not change --------------------------------------------------------------------------------------

void deterministic(const PropertySetting& s) {
  for (const char* text :
       {"T=150 H=2 HV=4 K=40 V=24 gate=mixed h0=1 dht=1", "T=130 H=1 K=128 gate=trained dtype=bf16"}) {
    const Data data = make_data(parse(s, text));
    const Run first = run_on(s, data.call(), {.threads = 1});
    require_equal("the same call again, its memory filled with zeros before", first,
                  run_on(s, data.call(), {.threads = 1, .poison = 0}));
    if (on_gpu(s)) continue;
    require_equal("2 threads against 1", first, run_on(s, data.call(), {.threads = 2}));
    require_equal("3 threads against 1", first, run_on(s, data.call(), {.threads = 3}));
  }
}

void check_causality(const PropertySetting& s, const std::string& text, std::int64_t token) {
  const Case c = parse(s, text);
  Data data = make_data(c);
  // A loss on the prefix: its gradients before `token` are those that must not change.
  const std::int64_t rest = c.problem.T - token;
  fill(slice(data.d_o.view, 1, token, rest), 0);
  Call call = data.call();
  const Run before = run_on(s, call);
  for (auto& [name, view] : token_inputs(call)) {
    Data changed = make_data(c);
    fill(slice(changed.d_o.view, 1, token, rest), 0);
    Call other = changed.call();
    for (auto& [other_name, other_view] : token_inputs(other)) {
      if (other_name != name) continue;
      fill(slice(*other_view, 1, token, 1), name == "g" ? -4.75 : name == "v" ? 2e4 : 0.875);
    }
    const Run after = run_on(s, other);
    for (const Output& output : before.outputs) {
      if (output.name == "final_state") continue;
      const bool all = !per_token(output.name);
      const TensorView& a = output.tensor.view;
      const TensorView& b = after[output.name];
      require_equal(
          "changing " + name + " of token " + std::to_string(token) + " changed " + output.name + " (" + text + ")",
          all ? a : slice(a, 1, 0, token), all ? b : slice(b, 1, 0, token));
    }
  }
}

void causal(const PropertySetting& s) {
  check_causality(s, "T=22 H=1 K=128 V=64 dtype=bf16 gate=bounded beta=one h0=1", 21);
  for (const char* gate : {"mild", "bounded", "trained", "strong"}) {
    const std::string text = std::string("T=131 H=1 HV=2 K=40 V=24 h0=1 gate=") + gate;
    for (const std::int64_t token : {17, 64, 130}) check_causality(s, text, token);
  }
}

void batch_alone(const PropertySetting& s) {
  const Data data = make_data(parse(s, "B=3 T=75 H=2 HV=4 K=40 V=24 h0=1 dht=1 gate=mixed"));
  const Run together = run_on(s, data.call());
  for (std::int64_t row = 0; row < 3; ++row) {
    Call alone = data.call();
    for (auto& [name, view] : token_inputs(alone)) *view = slice(*view, 0, row, 1);
    alone.d_o = slice(alone.d_o, 0, row, 1);
    alone.in.initial_state = slice(alone.in.initial_state, 0, row, 1);
    alone.d_final_state = slice(alone.d_final_state, 0, row, 1);
    alone.problem.B = 1;
    const Run one = run_on(s, alone);
    for (const Output& output : one.outputs) {
      require_equal("batch row " + std::to_string(row) + " alone: " + output.name, output.tensor.view,
                    slice(together[output.name], 0, row, 1));
    }
  }
}

void packed_alone(const PropertySetting& s) {
  const Case c = parse(s, "T=230 packed=70,0,1,64,65,0 H=1 HV=2 K=40 V=24 h0=1 dht=1 gate=mixed");
  const Data data = make_data(c);
  const Run together = run_on(s, data.call());
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < c.lengths.size(); ++i) {
    const auto index = static_cast<std::int64_t>(i);
    const Run one = run_on(s, segment(data.call(), index, begin, c.lengths[i]));
    for (const Output& output : one.outputs) {
      const TensorView part = per_token(output.name) ? slice(together[output.name], 1, begin, c.lengths[i])
                                                     : slice(together[output.name], 0, index, 1);
      require_equal("segment " + std::to_string(i) + " alone: " + output.name, output.tensor.view, part);
    }
    begin += c.lengths[i];
  }
  for (const Output& output : together.outputs) {
    if (!per_token(output.name)) continue;
    require_all(output.name + " after the last offset", slice(output.tensor.view, 1, begin, c.problem.T - begin),
                is_zero);
  }
}

void inputs_untouched(const PropertySetting& s) {
  for (const char* text : {"T=70 packed=33,0,32 H=2 K=24 h0=1 dht=1", "T=70 H=2 K=24 h0=1 dht=1 strides=packed"}) {
    const Data data = make_data(parse(s, text));
    const Tensor* tensors[] = {&data.q,
                               &data.k,
                               &data.v,
                               &data.g,
                               &data.beta,
                               &data.b,
                               &data.w,
                               &data.d_o,
                               &data.initial_state,
                               &data.cu_seqlens,
                               &data.d_final_state};
    std::vector<std::vector<std::byte>> before;
    for (const Tensor* t : tensors) before.emplace_back(t->buffer.span().begin(), t->buffer.span().end());
    run_on(s, data.call());
    for (std::size_t i = 0; i < before.size(); ++i) {
      const auto now = tensors[i]->buffer.span();
      if (!std::equal(now.begin(), now.end(), before[i].begin())) fail("input " + std::to_string(i) + " was written");
    }
  }
}

void policies_agree(const PropertySetting& s) {
  const std::string text = "T=150 packed=70,0,64 H=1 HV=2 K=40 V=24 h0=1 dht=1 gate=mixed policy=";
  const Data recompute = make_data(parse(s, text + "recompute"));
  const Data save = make_data(parse(s, text + "save"));
  const Run expected = run_on(s, recompute.call());
  require_equal("policy save against recompute", expected, run_on(s, save.call()));
  require_equal("nothing saved against A saved", expected, run_on(s, recompute.call(), {.saved = false}));
}

void offset_types_agree(const PropertySetting& s) {
  const std::string text = "T=150 packed=0,70,64 H=1 K=24 gate=mild offsets=";
  const Data narrow = make_data(parse(s, text + "i32"));
  const Data wide = make_data(parse(s, text + "i64"));
  require_equal("int64 offsets against int32", run_on(s, narrow.call()), run_on(s, wide.call()));
}

void offsets_read_each_call(const PropertySetting& s) {
  // The same address with new contents, back and forth: nothing may be remembered by address.
  Data data = make_data(parse(s, "T=96 packed=32,64 H=1 K=16 gate=mild"));
  const TensorView middle = slice(data.cu_seqlens.view, 0, 1, 1);
  const Run first = run_on(s, data.call());
  for (int i = 1; i <= 20; ++i) {
    fill(middle, i);
    Data fresh =
        make_data(parse(s, "T=96 H=1 K=16 gate=mild packed=" + std::to_string(i) + "," + std::to_string(96 - i)));
    require_equal("offsets changed in place", run_on(s, data.call()), run_on(s, fresh.call()));
  }
  fill(middle, 32);
  require_equal("offsets changed back in place", first, run_on(s, data.call()));
}

void strides_honoured(const PropertySetting& s) {
  // The second has axes of one element only, with a table width as their stride.
  for (const std::string text : {"B=2 T=70 H=2 K=24 V=40 h0=1 dht=1 gate=mixed", "T=1 H=1 K=8 h0=1 dht=1"}) {
    const Run dense = run_on(s, make_data(parse(s, text)).call());
    for (const char* strides : {"packed", "odd"}) {
      const Case c = parse(s, text + " strides=" + strides);
      try {
        require_equal(std::string("strides ") + strides, dense, run_on(s, make_data(c).call()));
      } catch (const Error&) {
        if (service(c, s.device).kind == Service::Kind::kServed) throw;
      }
    }
  }
}

void layouts_agree(const PropertySetting& s) {
  const std::string text = "T=70 H=1 K=24 V=40 h0=1 dht=1 layout=";
  const Data kv = make_data(parse(s, text + "kv"));
  const Data vk = make_data(parse(s, text + "vk"));
  const auto transposed = [](TensorView v) {
    std::swap(v.shape[2], v.shape[3]);
    std::swap(v.strides[2], v.strides[3]);
    return v;
  };
  Call call = vk.call();
  call.in.initial_state = transposed(kv.initial_state.view);
  call.d_final_state = transposed(kv.d_final_state.view);
  const Run a = run_on(s, kv.call());
  const Run b = run_on(s, call);
  for (const Output& output : a.outputs) {
    const TensorView other = b[output.name];
    require_equal("layout vk: " + output.name, output.tensor.view, per_token(output.name) ? other : transposed(other));
  }
}

void nan_stays(const PropertySetting& s) {
  const Case c = parse(s, "B=2 T=150 H=2 K=24 V=40 h0=1 dht=1 gate=mild");
  constexpr std::int64_t kToken = 77;
  // A GPU's products take whole chunks: there a NaN may reach back to the start of its chunk (docs/numerics.md).
  const std::int64_t before = on_gpu(s) && !forward_alone(s) ? kToken / kChunk * kChunk : kToken;
  const Data clean = make_data(c);
  const Run expected = run_on(s, clean.call());
  Call names = clean.call();
  for (auto& [name, unused] : token_inputs(names)) {
    Data data = make_data(c);
    Call call = data.call();
    for (auto& [other, view] : token_inputs(call)) {
      if (other == name) {
        fill(slice(slice(slice(*view, 0, 1, 1), 2, 1, 1), 1, kToken, 1), std::numeric_limits<double>::quiet_NaN());
      }
    }
    const Run actual = run_on(s, call);
    for (const Output& output : actual.outputs) {
      const TensorView& a = output.tensor.view;
      const TensorView& b = expected[output.name];
      const int heads = per_token(output.name) ? 2 : 1;
      const std::string what = "NaN in " + name + " of one token and head, " + output.name;
      require_equal(what + " of the other batch row", slice(a, 0, 0, 1), slice(b, 0, 0, 1));
      require_equal(what + " of the other head", slice(a, heads, 0, 1), slice(b, heads, 0, 1));
      if (output.name == "o") require_equal(what + " before it", slice(a, 1, 0, before), slice(b, 1, 0, before));
    }
    if (on_gpu(s) && !forward_alone(s)) continue;
    const Comparison o =
        compare("o", actual["o"], run_reference(call, 1)["o"], Keys::kNormal, products_of(s.device, s.schedule));
    if (!o.passed) fail("NaN in " + name + ", o against the reference: " + o.reason + ": " + o.worst);
  }
}

// ---- Values that must be exact --------------------------------------------------------------------------------------

void empty_passes_through(const PropertySetting& s) {
  for (const char* text : {"B=2 T=0 H=1 K=24 V=40 h0=1 dht=1", "packed=0,0,0 H=1 K=24 V=40 h0=1 dht=1",
                           "T=20 packed=0,0 H=1 K=24 V=40 h0=1 dht=1"}) {
    const Data data = make_data(parse(s, text));
    const Run r = run_on(s, data.call());
    require_equal("final state of no tokens", r["final_state"], data.initial_state.view);
    if (!forward_alone(s)) {
      require_equal("initial state's gradient of no tokens", r["dinitial_state"], data.d_final_state.view);
    }
  }
}

/// The key and query of token i of a sequence is the unit vector i: no two tokens interact.
void diagonal_gives_no_dg(const PropertySetting& s) {
  for (const char* gate : {"const:-5", "mild", "trained"}) {
    Data data = make_data(parse(s, std::string("T=96 H=1 K=96 V=24 gate=") + gate));
    for (const TensorView& view : {data.q.view, data.k.view}) {
      for_each(view, [&](std::byte* at, const Index& index, std::int64_t) {
        store_element(at, view.dtype, index[1] == index[3] ? 1 : 0);
      });
    }
    require_all("dg of tokens that do not interact", run_on(s, data.call())["dg"], is_zero);
  }
}

/// With beta = 0, g = 0, every query the first unit vector and a state that maps it to the first value, token i adds
/// exactly dO_i to dG_i; 32 large ones before 32 small ones.
void suffix_sums_exact(const PropertySetting& s) {
  Data data = make_data(parse(s, "T=64 H=1 K=16 V=16 h0=1 beta=zero gate=zero scale=1"));
  for (const TensorView& view : {data.q.view, data.initial_state.view, data.d_o.view}) fill(view, 0);
  fill(slice(data.q.view, 3, 0, 1), 1);
  fill(slice(slice(data.initial_state.view, 2, 0, 1), 3, 0, 1), 1);
  const TensorView first = slice(data.d_o.view, 3, 0, 1);
  fill(slice(first, 1, 0, 32), 1e8);
  fill(slice(first, 1, 32, 32), 1);
  const Run r = run_on(s, data.call());
  const TensorView dg = r["dg"];
  const std::vector<double> got = values(dg.rank == 4 ? slice(dg, 3, 0, 1) : dg);
  for (int t = 32; t < 64; ++t) {
    if (got[static_cast<std::size_t>(t)] != 64 - t) {
      fail("dg of token " + std::to_string(t) + " is " + std::to_string(got[static_cast<std::size_t>(t)]) + ", not " +
           std::to_string(64 - t));
    }
  }
}

void reset_gives_no_dg(const PropertySetting& s) {
  const Data data = make_data(parse(s, "T=150 H=2 K=24 V=40 h0=1 dht=1 gate=reset"));
  const Run r = run_on(s, data.call());
  for (const Output& output : r.outputs) require_all(output.name + " with resets", output.tensor.view, is_finite);
  if (forward_alone(s)) return;
  const std::vector<double> dg = values(r["dg"]);
  for_each(data.g.view, [&](const std::byte* at, const Index& index, std::int64_t i) {
    if (load_element(at, data.g.view.dtype) == -kInfinity && dg[static_cast<std::size_t>(i)] != 0) {
      fail("dg is not 0 where g is -inf, at " + index_text(index, data.g.view.rank));
    }
  });
}

void reset_forgets(const PropertySetting& s) {
  // Everything before the token is forgotten: its outputs and those after it are those of a call that starts there.
  constexpr std::int64_t kToken = 37;
  Data data = make_data(parse(s, "T=150 H=1 K=24 V=40 h0=1 gate=mild"));
  fill(slice(data.g.view, 1, kToken, 1), -kInfinity);
  Call late = tokens(data.call(), kToken, 150 - kToken);
  late.in.initial_state = {};
  const Run whole = run_on(s, data.call());
  const Run rest = run_on(s, late);
  for (const Output& output : rest.outputs) {
    const bool row = per_token(output.name);
    require_close(s, "after a reset", output.name,
                  row ? slice(whole[output.name], 1, kToken, 150 - kToken) : whole[output.name], output.tensor.view);
  }
}

/// v - S k is 4096 - 4098, which 16 bits cannot hold on the way: dbeta is (v - S k) times dO. A GPU stages states in 16
/// bits, so that there 4098 is the sum of two products; elsewhere it is a state's element.
void residual_exact(const PropertySetting& s) {
  Data data = make_data(parse(s, "T=1 H=1 K=8 V=8 h0=1 beta=one gate=zero dtype=bf16 strength_dtype=bf16 scale=1"));
  for (const TensorView& view : {data.q.view, data.k.view, data.v.view, data.d_o.view, data.initial_state.view}) {
    fill(view, 0);
  }
  fill(slice(data.q.view, 3, 0, 1), 1);
  fill(slice(data.k.view, 3, 0, on_gpu(s) ? 2 : 1), 1);
  fill(slice(data.v.view, 3, 0, 1), 4096);
  fill(slice(data.d_o.view, 3, 0, 1), 128);
  const TensorView first_value = slice(data.initial_state.view, 3, 0, 1);
  fill(slice(first_value, 2, 0, 1), on_gpu(s) ? 4096 : 4098);
  if (on_gpu(s)) fill(slice(first_value, 2, 1, 1), 2);
  const Run r = run_on(s, data.call());
  if (const double o = values(r["o"])[0]; o != 4096) fail("o is " + std::to_string(o) + ", not 4096");
  if (forward_alone(s)) return;
  if (r.has("dbeta")) {
    if (const double d = values(r["dbeta"])[0]; d != -256) fail("dbeta is " + std::to_string(d) + ", not -256");
  } else {
    // Erase and write apart: -4098 and 4096 times dO, in bf16.
    const double state = on_gpu(s) ? 4096 : 4098;
    if (const double d = values(r["db"])[0]; d != round_to(DType::kBF16, -state * 128)) {
      fail("db is " + std::to_string(d));
    }
    if (const double d = values(r["dw"])[0]; d != 4096.0 * 128) fail("dw is " + std::to_string(d));
  }
}

void beta_zero_writes_nothing(const PropertySetting& s) {
  const Data data = make_data(parse(s, "T=150 H=1 K=24 V=40 h0=1 beta=zero gate=zero"));
  const Run r = run_on(s, data.call());
  require_equal("the state, with beta = 0 and g = 0", r["final_state"], data.initial_state.view);
  if (!forward_alone(s)) require_all("dv with beta = 0", r["dv"], is_zero);
}

// ---- Equal within rounding ------------------------------------------------------------------------------------------

void zero_gate_is_ungated(const PropertySetting& s) {
  // GDN2 with b = w = beta, and every gate 0, is the ungated rule.
  const std::string text = "B=2 T=150 H=1 HV=2 K=24 V=40 h0=1 dht=1";
  PropertySetting other = s;
  other.op = Operator::kDeltaNet;
  Case ungated = parse(other, text);
  Case zero = parse(s, text + " gate=zero");
  // Of one type, so that both have the same values.
  ungated.problem.strength_dtype = zero.problem.strength_dtype = zero.problem.dtype;
  const Data plain = make_data(ungated);
  Data gated = make_data(zero);
  if (strength_of(s.op) == Strength::kIndependent) {
    const std::vector<double> beta = values(plain.beta.view);
    for (const TensorView& view : {gated.b.view, gated.w.view}) {
      for_each(view, [&](std::byte* at, const Index& i, std::int64_t) {
        store_element(at, view.dtype,
                      beta[static_cast<std::size_t>((i[0] * view.shape[1] + i[1]) * view.shape[2] + i[2])]);
      });
    }
  }
  const Run a = run_on(s, gated.call());
  const Run b = run_on(s, plain.call());
  for (const Output& output : b.outputs) {
    if (a.has(output.name))
      require_close(s, "gate zero against deltanet", output.name, a[output.name], output.tensor.view);
  }
}

void split_is_whole(const PropertySetting& s) {
  const Data data = make_data(parse(s, "T=150 H=1 HV=2 K=24 V=40 h0=1 dht=1 gate=mild"));
  const Run whole = run_on(s, data.call());
  for (const std::int64_t at : {1, 5, 64, 100, 149}) {
    Call first = tokens(data.call(), 0, at);
    Call second = tokens(data.call(), at, 150 - at);
    first.d_final_state = {};
    const Run head = run_on(s, first, {.backward = false});
    second.in.initial_state = head["final_state"];
    const Run tail = run_on(s, second);
    if (!forward_alone(s)) first.d_final_state = tail["dinitial_state"];
    const Run head_backward = run_on(s, first);
    const std::string what = "split after " + std::to_string(at) + " tokens";
    for (const Output& output : whole.outputs) {
      const TensorView& all = output.tensor.view;
      if (output.name == "final_state") {
        require_close(s, what, output.name, tail[output.name], all);
      } else if (output.name == "dinitial_state") {
        require_close(s, what, output.name, head_backward[output.name], all);
      } else {
        require_close(s, what, output.name, head_backward[output.name], slice(all, 1, 0, at));
        require_close(s, what, output.name, tail[output.name], slice(all, 1, at, 150 - at));
      }
    }
  }
}

/// Each may be off by what it is allowed against the reference; of the two the chunks are allowed more.
void schedules_agree(const PropertySetting& s) {
  for (const char* text : {"B=2 T=150 H=1 HV=2 K=40 V=24 h0=1 gate=mixed", "T=7 H=2 K=128 V=64 dtype=bf16 gate=trained",
                           "T=90 packed=1,0,70,5 H=2 K=64 V=40 h0=1 gate=reset dtype=f16 layout=vk"}) {
    const Data data = make_data(parse(s, text));
    const Run chunks = run_on(s, data.call(), {.backward = false});
    PropertySetting by_token = s;
    by_token.schedule = Schedule::kTokens;
    const Run tokens = run_on(by_token, data.call());
    for (const Output& output : chunks.outputs) {
      require_close(s, "chunks against tokens", output.name, output.tensor.view, tokens[output.name]);
    }
  }
}

void graphs_agree(const PropertySetting& s) {
  const std::string text = "T=150 H=1 HV=2 K=24 V=40 h0=1 dht=1 gate=mild ";
  const Run plain = run_on(s, make_data(parse(s, text)).call());
  for (const char* variant :
       {"graph=expanded", "intra=pairwise", "gram=off", "graph=expanded intra=pairwise gram=off"}) {
    const Run other = run_on(s, make_data(parse(s, text + variant)).call());
    for (const Output& output : plain.outputs) {
      require_close(s, variant, output.name, other[output.name], output.tensor.view);
    }
  }
}

// ---- Refusals -------------------------------------------------------------------------------------------------------

void bad_calls_refused(const PropertySetting& s) {
  const Data data = make_data(parse(s, "T=128 packed=64,64 H=2 HV=4 K=16 h0=1"));
  const auto refused = [&](const std::string& what, const std::function<void(Call&)>& spoil) {
    Call call = data.call();
    spoil(call);
    try {
      run_on(s, call);
    } catch (const Error&) {
      return;
    }
    fail(what + " was not refused");
  };
  Tensor back = make_offsets({12, 8}, DType::kI32);
  fill(slice(back.view, 0, 2, 1), 8);
  Tensor late = make_offsets({64, 65}, DType::kI32);
  Tensor shifted = make_offsets({64, 64}, DType::kI32);
  fill(slice(shifted.view, 0, 0, 1), 1);
  if (!on_gpu(s)) {
    refused("offsets that go back", [&](Call& c) { c.in.cu_seqlens = back.view; });
    refused("offsets that end past T", [&](Call& c) { c.in.cu_seqlens = late.view; });
    refused("offsets that do not start at 0", [&](Call& c) { c.in.cu_seqlens = shifted.view; });
  } else {
    // Nobody reads them before the launch; they are clamped, so that no memory of others is touched, which run() sees.
    for (const Tensor* offsets : {&back, &late, &shifted}) {
      Call call = data.call();
      call.in.cu_seqlens = offsets->view;
      run_on(s, call);
    }
  }
  refused("a packed call of two batch rows", [](Call& c) { c.problem.B = 2; });
  refused("HV that is no multiple of H", [](Call& c) { c.problem.HV = 3; });
  refused("keys of another width", [](Call& c) { c.in.k = slice(c.in.k, 3, 0, 8); });
  refused("values of another type", [](Call& c) { c.in.v.dtype = DType::kF16; });
  refused("a missing query", [](Call& c) { c.in.q = {}; });
  refused("a state of the other layout's shape", [](Call& c) { c.in.initial_state.shape = {2, 4, 16, 17}; });
  if (forward_alone(s)) refused("policy save", [](Call& c) { c.problem.policy = Policy::kSave; });
}

// ---- A GPU's ways to run --------------------------------------------------------------------------------------------

/// Three packed calls of one shape, with other contents and other offsets each.
std::vector<Data> three_contents(const PropertySetting& s) {
  std::vector<Data> all;
  for (const char* rest : {"packed=70,0,60,20 seed=1", "packed=0,1,64,85 seed=2", "packed=150,0,0,0 seed=3"}) {
    all.push_back(make_data(parse(s, std::string("T=150 H=2 HV=4 K=64 V=40 h0=1 dht=1 gate=mixed ") + rest)));
  }
  return all;
}

std::vector<Call> calls_of(const std::vector<Data>& data) {
  std::vector<Call> calls;
  for (const Data& d : data) calls.push_back(d.call());
  return calls;
}

RunOptions options_of(const PropertySetting& s) {
  return {.device = s.device, .backend = s.backend, .architecture = s.architecture, .schedule = s.schedule};
}

void captured_in_a_graph(const PropertySetting& s) {
  const std::vector<Data> data = three_contents(s);
  const std::vector<Call> calls = calls_of(data);
  const std::vector<Run> replayed = run_captured(calls, options_of(s));
  for (std::size_t i = 0; i < calls.size(); ++i) {
    require_equal("contents " + std::to_string(i) + " in a graph captured with contents 0", replayed[i],
                  run_on(s, calls[i]));
  }
}

void on_streams_at_once(const PropertySetting& s) {
  const std::vector<Data> data = three_contents(s);
  const std::vector<Call> calls = calls_of(data);
  const std::vector<Run> together = run_together(calls, options_of(s));
  for (std::size_t i = 0; i < calls.size(); ++i) {
    require_equal("stream " + std::to_string(i) + " beside others", together[i], run_on(s, calls[i]));
  }
}

void beyond_32_bits(const PropertySetting& s) {
  check_huge(s.op, options_of(s));
}

// ---- Around the operators -------------------------------------------------------------------------------------------

void activations_agree(const PropertySetting& s) {
  check_activation(s.op, options_of(s));
}

void activations_beyond_32_bits(const PropertySetting& s) {
  check_huge_activation(s.op, s.device);
}

bool any(Operator) {
  return true;
}
bool gated(Operator op) {
  return gate_of(op) != Gate::kNone;
}

}  // namespace

const std::vector<Property>& properties() {
  static const std::vector<Property> all{
      {"determinism", "the same bits twice, whatever lay in memory, and for any number of threads", any, deterministic},
      {"causality", "inputs of a token change no bit of anything before it", any, causal},
      {"batch", "a batch row alone gives the bits it gives in the batch", any, batch_alone},
      {"packed", "a segment alone gives the bits it gives when packed; rows after the last offset are 0", any,
       packed_alone},
      {"inputs", "inputs are never written", any, inputs_untouched},
      {"policy", "saved and recomputed intermediates give the same bits", any, policies_agree, Schedules::kChunks},
      {"offset_types", "int32 and int64 offsets give the same bits", any, offset_types_agree},
      {"offset_contents", "offsets are read at every call", any, offsets_read_each_call},
      {"strides", "strided inputs give the bits of dense ones", any, strides_honoured},
      {"layout", "a transposed state gives the same bits", any, layouts_agree},
      {"nan", "NaN moves forward in time inside its head, nowhere else", any, nan_stays},
      {"empty", "no tokens: the state and its gradient pass through in bits", any, empty_passes_through},
      {"diagonal", "tokens that do not interact give dg exactly 0", gated, diagonal_gives_no_dg, Schedules::kChunks},
      {"suffix", "sums over the tokens that follow are exact after large ones before", gated, suffix_sums_exact,
       Schedules::kChunks},
      {"reset", "g = -inf gives dg 0 there and nothing that is not finite", gated, reset_gives_no_dg},
      {"forget", "after g = -inf at one token nothing earlier matters", gated, reset_forgets},
      {"residual", "v - S k is subtracted before it is rounded", any, residual_exact},
      {"beta_zero", "beta = 0 leaves the state as it was, in bits", any, beta_zero_writes_nothing},
      {"zero_gate", "g = 0 everywhere is the ungated rule", gated, zero_gate_is_ungated},
      {"split", "two calls that hand the state on are one call", any, split_is_whole},
      {"schedules", "chunks and tokens give the same outputs and states", any, schedules_agree, Schedules::kChunks},
      {"graphs", "all derivative graphs give the same gradients", any, graphs_agree, Schedules::kChunks, Where::kCpu},
      {"refusals", "calls with wrong arguments are refused", any, bad_calls_refused},
      {"activation", "normalisation, gates and strengths against the reference, in bits for any strides and threads",
       any, activations_agree, Schedules::kChunks},
      {"capture", "a captured graph computes with the contents of its replay", any, captured_in_a_graph,
       Schedules::kBoth, Where::kGpu},
      {"streams", "calls on several streams at once do not disturb each other", any, on_streams_at_once,
       Schedules::kBoth, Where::kGpu},
      {"huge", "offsets beyond 2^31 elements: every batch row gives the bits it gives alone", any, beyond_32_bits,
       Schedules::kBoth, Where::kGpu, true},
      {"huge_activation", "the same of normalisation, gates and strengths", any, activations_beyond_32_bits,
       Schedules::kChunks, Where::kGpu, true}};
  return all;
}

bool Property::holds_on(const Device& device) const {
  return where == Where::kEverywhere || (where == Where::kGpu) == (device.kind == DeviceKind::kCuda);
}

std::vector<std::string> property_lines(const Device& device) {
  std::vector<std::string> lines;
  for (const Property& property : properties()) {
    if (!property.holds_on(device) || property.by_name_only) continue;
    for (const Operator op : {Operator::kDeltaNet, Operator::kGdn, Operator::kKda, Operator::kGdn2}) {
      if (!property.applies(op)) continue;
      lines.push_back("property=" + property.name + " op=" + std::string(name(op)));
      if (property.schedules == Schedules::kBoth) lines.push_back(lines.back() + " schedule=tokens");
    }
  }
  return lines;
}

bool is_property_line(const std::string& text) {
  return text.find("property=") != std::string::npos;
}

CheckResult check_property(const std::string& text, const RunOptions& options) {
  std::string names;
  for (const Property& property : properties()) names += (names.empty() ? "" : "|") + property.name;
  PropertySetting setting{.backend = options.backend, .device = options.device, .architecture = options.architecture};
  const Property* chosen = nullptr;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const std::size_t equals = word.find('=');
    const std::string key = word.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : word.substr(equals + 1);
    if (key == "op") {
      setting.op = parse_operator(value);
    } else if (key == "schedule") {
      setting.schedule = parse_schedule(value);
    } else if (key == "property") {
      for (const Property& property : properties()) {
        if (property.name == value) chosen = &property;
      }
      if (chosen == nullptr) throw Error("check", "property", names, "'" + value + "'");
    } else {
      throw Error("check", key, "property=NAME op=OPERATOR schedule=SCHEDULE", "'" + word + "'");
    }
  }
  if (chosen == nullptr) throw Error("check", "property", names, "none");
  if (!chosen->applies(setting.op)) {
    throw Error("check", "op", "an operator with a gate for property " + chosen->name, std::string(name(setting.op)));
  }
  if (forward_alone(setting) && chosen->schedules == Schedules::kChunks) {
    throw Error("check", "schedule", "chunks, which property " + chosen->name + " is about", "tokens");
  }
  if (!chosen->holds_on(options.device)) {
    throw Error("check", "device", "one that property " + chosen->name + " is about", device_text(options.device));
  }

  CheckResult result;
  result.text = "property=" + chosen->name + " op=" + std::string(name(setting.op));
  if (forward_alone(setting)) result.text += " schedule=tokens";
  result.backend = options.device.kind == DeviceKind::kCuda ? name(options.device.kind) : name(options.backend);
  const auto start = std::chrono::steady_clock::now();
  try {
    chosen->check(setting);
    result.passed = true;
    result.detail = chosen->meaning;
  } catch (const std::exception& e) {
    result.detail = e.what();
  }
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

}  // namespace rewy::tool

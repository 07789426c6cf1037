/// @file  Tests of ckpt/sharded_checkpoint.hpp: exact resumption, every layout into every other,
/// a fault at every call of a collective save, damaged and hostile files.
#include "../../support/run_residual.hpp"
#include "../../support/temporary_directory.hpp"
#include <mega/ckpt/sharded_checkpoint.hpp>
#include <mega/comm/self.hpp>
#include <mega/comm/thread.hpp>
#include <mega/core/mesh.hpp>
#include <mega/core/parameter.hpp>
#include <mega/core/rng.hpp>
#include <mega/host/host.hpp>
#include <mega/host/host_async.hpp>
#include <mega/train/parameter_store.hpp>
#include <mega/train/parameter_table.hpp>
#include <mega/train/trainer.hpp>

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace ckpt = mega::ckpt;
namespace fs = std::filesystem;
using mega::Error;
using mega::ErrorCode;
using mega::Index;
using mega::Mesh;
using mega::Parameter;
using mega::ThreadComm;
using mega::tests::contains;
using mega::tests::content_of;
using mega::tests::sentence_of;
using mega::tests::TemporaryDirectory;
using mega::tests::throws_code;

namespace {

// A model of parameters alone, with every kind of sharding, and its contents as a function.

struct Layout {
  Mesh mesh{};
  int chunks = 1;
  bool shard_optimizer = false;
  friend std::string to_string(const Layout& l) {
    return mega::to_string(l.mesh) + " v" + std::to_string(l.chunks) +
           (l.shard_optimizer ? " zero" : "");
  }
};

using Layers = std::vector<std::vector<Parameter>>;

/// Parts that no degree divides, runs that interleave, a scalar, an empty tensor, a tie.
Layers hard_model() {
  return {{{.name = "embedding", .shape = {101, 4}, .shard = {0, {101}}},
           {.name = "norm.0", .shape = {4}, .partial_over_tensor = true}},
          {{.name = "qkv", .shape = {30, 5}, .shard = {0, {14, 8, 8}}},
           {.name = "scale", .shape = {}},
           {.name = "qkv/bias #0", .shape = {30}, .shard = {0, {14, 8, 8}}}},
          {{.name = "out", .shape = {6, 30}, .shard = {1, {14, 16}}},
           {.name = "bias", .shape = {7}},
           {.name = "cube", .shape = {3, 5, 2}, .shard = {1, {5}}}},
          {{.name = "wide", .shape = {257, 9}},
           {.name = "nothing", .shape = {0, 3}},
           {.name = "norm.1", .shape = {4}, .partial_over_tensor = true}},
          {{.name = "head", .shape = {101, 4}, .shard = {0, {101}}, .tied_to = "embedding"}}};
}

Layers small_model() {
  return {{{.name = "a", .shape = {5, 7}}, {.name = "b", .shape = {3}}},
          {{.name = "c", .shape = {33}}}};
}

std::vector<std::vector<Parameter>> dealt(const Layers& layers, int stages) {
  std::vector<std::vector<Parameter>> out(static_cast<std::size_t>(stages));
  for (std::size_t l = 0; l < layers.size(); ++l) {
    auto& stage = out[l * out.size() / layers.size()];
    stage.insert(stage.end(), layers[l].begin(), layers[l].end());
  }
  return out;
}

using Store = mega::train::ParameterStore<mega::Host>;

Store make_store(mega::Host& device, const Layers& layers, const Layout& layout, int rank) {
  const mega::Coordinates at = layout.mesh.coordinates(rank);
  std::vector<int> own;
  for (int c = 0; c < layout.chunks; ++c)
    own.push_back(c * layout.mesh.pipeline + at[mega::Axis::pipeline]);
  const auto stages = dealt(layers, layout.mesh.pipeline * layout.chunks);
  Store store(
      device,
      {stages,
       own,
       {at[mega::Axis::tensor], layout.mesh.tensor, at[mega::Axis::data], layout.mesh.data}},
      layout.shard_optimizer);
  // Whatever is not written by a load is seen as this.
  for (const auto buffer : {store.values(), store.first_moments(), store.second_moments()})
    std::fill(buffer.data(), buffer.data() + buffer.size(), 77.0F);
  return store;
}

enum Kind : std::uint32_t { value, first_moment, second_moment };

/// Any bits at all, NaN included: a checkpoint carries bits.
std::uint32_t content(const Parameter& p, Kind kind, std::uint64_t salt, Index global) {
  const std::string& name = p.tied_to.empty() ? p.name : p.tied_to;
  return mega::RandomKey{salt, kind, mega::name_hash(name), mega::RandomUse::test}.bits(global);
}

/// Calls visit(element of a flat buffer, bits it must have) for all that the rank holds of `kind`.
template <class Visit>
void for_each_element(const Store& store, Kind kind, std::uint64_t salt, const Visit& visit) {
  const auto place = store.table().position();
  for (const auto& e : store.table().entries()) {
    if (e.alias) continue;
    std::vector<std::uint32_t> want(static_cast<std::size_t>(e.size), 0);  // padding
    for (const auto& run : mega::shard_runs(e.parameter, place.tensor, place.tensor_degree)) {
      for (Index i = 0; i < run.count; ++i)
        want[static_cast<std::size_t>(run.local + i)] =
            content(e.parameter, kind, salt, run.global + i);
    }
    const auto& own = store.owned()[static_cast<std::size_t>(e.chunk)];
    for (Index i = 0; i < e.size; ++i) {
      const Index at = e.value + i;
      if (kind == value) {
        visit(store.values()(at), want[static_cast<std::size_t>(i)]);
      } else if (at >= own.values.begin && at < own.values.end) {
        const auto& moments = kind == first_moment ? store.first_moments() : store.second_moments();
        visit(moments(own.moments + at - own.values.begin), want[static_cast<std::size_t>(i)]);
      }
    }
  }
}

void fill(const Store& store, std::uint64_t salt) {
  for (const Kind kind : {value, first_moment, second_moment}) {
    for_each_element(store, kind, salt, [](float& x, std::uint32_t bits) {
      if (bits != 0) std::memcpy(&x, &bits, sizeof x);  // padding stays dirty
    });
  }
}

Index wrong_elements(const Store& store, std::uint64_t salt) {
  Index wrong = 0;
  for (const Kind kind : {value, first_moment, second_moment}) {
    for_each_element(store, kind, salt, [&](float& x, std::uint32_t bits) {
      wrong += std::memcmp(&x, &bits, sizeof x) != 0;
    });
  }
  return wrong;
}

bool untouched(const Store& store) {
  for (const auto buffer : {store.values(), store.first_moments(), store.second_moments()})
    for (Index i = 0; i < buffer.size(); ++i)
      if (buffer(i) != 77.0F) return false;
  return true;
}

ckpt::TrainingState state_of(Index step) {
  return {step, step * 24, 0xFFFF'FFFF'FFFF'FFFFu, {{"layers", 5}, {"name", "h\u00e4rd"}}};
}

/// What every rank said; empty if it threw nothing.
struct Told {
  std::vector<std::string> sentences;
  std::vector<ErrorCode> codes;

  [[nodiscard]] bool silent() const {
    for (const auto& s : sentences)
      if (!s.empty()) return false;
    return true;
  }
  /// All ranks threw the same.
  [[nodiscard]] bool unanimous(ErrorCode code) const {
    for (std::size_t r = 0; r < sentences.size(); ++r)
      if (sentences[r].empty() || sentences[r] != sentences[0] || codes[r] != code) return false;
    return true;
  }
};

/// f(sharded store, rank) on the ranks of a layout.
template <class F>
Told on_ranks(const Layers& layers, const Layout& layout, const F& f) {
  Told told;
  told.sentences.resize(static_cast<std::size_t>(layout.mesh.size()));
  told.codes.resize(told.sentences.size());
  mega::run_threads(layout.mesh.size(), [&](ThreadComm& world) {
    mega::Host device;
    auto stream = device.make_stream("test");
    auto store = make_store(device, layers, layout, world.rank());
    try {
      f(ckpt::ShardedStore{store, layout.mesh, world, device, stream}, world.rank());
    } catch (const Error& fault) {
      told.sentences[static_cast<std::size_t>(world.rank())] = fault.what();
      told.codes[static_cast<std::size_t>(world.rank())] = fault.code();
    }
  });
  return told;
}

Told save(const Layers& layers, const Layout& layout, const std::string& root, Index step,
          std::uint64_t salt, int keep = 0) {
  return on_ranks(layers, layout, [&](const auto& sharded, int) {
    fill(sharded.store, salt);
    ckpt::save_checkpoint(sharded, root, state_of(step), keep);
  });
}

struct Loaded {
  Told told;
  Index step = -1;
  std::string path;
  std::vector<ckpt::SkippedCheckpoint> skipped;
  Index wrong = 0;        ///< elements of all ranks that differ from `salt`'s
  Index wrong_other = 0;  ///< and from `other`'s
};

Loaded load(const Layers& layers, const Layout& layout, const std::string& root, std::uint64_t salt,
            std::uint64_t other = 0) {
  Loaded out;
  std::mutex mutex;
  out.told = on_ranks(layers, layout, [&](const auto& sharded, int) {
    const auto loaded = ckpt::load_latest_checkpoint(sharded, root);
    const std::lock_guard lock(mutex);
    out.step = loaded.state.steps_done;
    out.path = loaded.path;
    out.skipped = loaded.skipped;
    out.wrong += wrong_elements(sharded.store, salt);
    out.wrong_other += wrong_elements(sharded.store, other);
    const auto want = state_of(out.step);
    out.wrong += loaded.state.consumed_samples != want.consumed_samples ||
                 loaded.state.seed != want.seed || loaded.state.model != want.model;
  });
  return out;
}

const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all{
      {Mesh{1, 1, 1, 1}},          {Mesh{1, 1, 4, 2}, 1, true}, {Mesh{1, 1, 3, 1}},
      {Mesh{1, 1, 1, 4}},          {Mesh{1, 1, 1, 2}, 2},       {Mesh{2, 1, 1, 1}},
      {Mesh{3, 1, 2, 1}, 1, true}, {Mesh{2, 1, 2, 2}, 1, true}, {Mesh{4, 1, 1, 1}, 3},
      {Mesh{8, 1, 1, 1}},          {Mesh{2, 2, 2, 1}, 1, true}, {Mesh{1, 1, 8, 1}, 1, true}};
  return all;
}

std::string first_temporary(const std::string& root) {
  for (const auto& name : ckpt::list_directory(root))
    if (name.starts_with(".") || contains(name, "replaced")) return name;
  return {};
}

}  // namespace

TEST_CASE("sharded: what any layout saves, any other loads, bit by bit") {
  for (const Layout& saved : layouts()) {
    CAPTURE(to_string(saved));
    TemporaryDirectory dir;
    const auto told = save(hard_model(), saved, dir / "run", 7, 1);
    REQUIRE_MESSAGE(told.silent(), told.sentences[0]);

    // Nothing is stored twice, and no padding.
    const auto found = ckpt::latest_complete(dir / "run").found;
    REQUIRE(found.has_value());
    Index values = 0, moments = 0;
    for (const auto& file : found->manifest.files) {
      const ckpt::SafetensorsReader reader(found->file(file.name));
      for (const auto& tensor : reader.tensors()) {
        values += tensor.name.starts_with("value/") ? tensor.bytes / 4 : 0;
        moments += contains(tensor.name, "_moment/") ? tensor.bytes / 4 : 0;
      }
    }
    const Index model = 404 + 4 + 150 + 1 + 30 + 180 + 7 + 30 + 257 * 9 + 4;
    CHECK(values == model);
    CHECK(moments == 2 * model);

    for (const Layout& wanted : layouts()) {
      CAPTURE(to_string(wanted));
      const auto loaded = load(hard_model(), wanted, dir / "run", 1);
      REQUIRE_MESSAGE(loaded.told.silent(), loaded.told.sentences[0]);
      CHECK(loaded.step == 7);
      CHECK(loaded.wrong == 0);
      CHECK(loaded.skipped.empty());
      CHECK(loaded.path == dir / "run/step-00000007");
    }
  }
}

TEST_CASE("sharded: the test sees wrong contents") {
  TemporaryDirectory dir;
  REQUIRE(save(small_model(), {}, dir / "run", 7, 1).silent());
  CHECK(load(small_model(), {}, dir / "run", 2).wrong == 3 * (35 + 3 + 33));
}

TEST_CASE("sharded: one rank alone, without threads") {
  TemporaryDirectory dir;
  mega::Host device;
  auto stream = device.make_stream("test");
  mega::SelfComm world;
  auto store = make_store(device, hard_model(), {}, 0);
  const ckpt::ShardedStore sharded{store, Mesh{}, world, device, stream};
  fill(store, 3);
  const auto path = ckpt::save_checkpoint(sharded, dir / "run", state_of(0), 1);
  auto fresh = make_store(device, hard_model(), {}, 0);
  const ckpt::ShardedStore other{fresh, Mesh{}, world, device, stream};
  const auto loaded = ckpt::load_checkpoint(other, path);
  CHECK(loaded.state.steps_done == 0);
  CHECK(wrong_elements(fresh, 3) == 0);
}

TEST_CASE("sharded: retention keeps the newest, and 0 keeps all") {
  TemporaryDirectory dir;
  const Layout layout{Mesh{1, 1, 2, 1}, 1, true};
  for (Index step = 1; step <= 4; ++step)
    REQUIRE(save(small_model(), layout, dir / "run", step, 1).silent());
  CHECK(ckpt::list_directory(dir / "run").size() == 4 + 1);
  REQUIRE(save(small_model(), layout, dir / "run", 5, 2, 2).silent());
  CHECK(ckpt::list_directory(dir / "run") ==
        std::vector<std::string>{"latest", "step-00000004", "step-00000005"});
  CHECK(load(small_model(), {}, dir / "run", 2).wrong == 0);
}

TEST_CASE("sharded: impossible requests, on all ranks alike") {
  TemporaryDirectory dir;
  const Layout two{Mesh{1, 1, 2, 1}};
  CHECK(save(small_model(), two, dir / "run", -1, 1).unanimous(ErrorCode::usage));
  CHECK(save(small_model(), two, dir / "run", 1, 1, -1).unanimous(ErrorCode::usage));
  const auto differ = on_ranks(small_model(), two, [&](const auto& sharded, int rank) {
    auto state = state_of(4);
    state.consumed_samples += rank;  // a local count where the global one is due
    ckpt::save_checkpoint(sharded, dir / "run", state, 1);
  });
  CHECK(differ.unanimous(ErrorCode::usage));
  CHECK(contains(differ.sentences[0], "\"consumed_samples\":97"));
  CHECK(contains(differ.sentences[0], "\"consumed_samples\":96"));
  const auto place = on_ranks(small_model(), two, [&](const auto& sharded, int) {
    auto wrong = sharded;
    wrong.mesh = Mesh{2, 1, 1, 1};
    ckpt::save_checkpoint(wrong, dir / "run", state_of(1), 1);
  });
  CHECK(place.unanimous(ErrorCode::usage));
  CHECK(contains(place.sentences[0], "data rank 0 of 2"));
  // Nothing of these is left, not even a temporary directory.
  if (fs::exists(dir / "run")) CHECK(ckpt::list_directory(dir / "run").empty());
  auto name = small_model();
  name[0][0].name = "a\xff";
  CHECK(save(name, two, dir / "run", 1, 1).unanimous(ErrorCode::usage));
}

TEST_CASE("sharded: without a checkpoint it is the caller who decides") {
  TemporaryDirectory dir;
  const Layout two{Mesh{1, 1, 2, 1}};
  for (const auto& root : {dir / "absent", dir.path()}) {
    const auto loaded = load(small_model(), two, root, 1);
    CHECK(loaded.told.unanimous(ErrorCode::bad_input));
    CHECK(contains(loaded.told.sentences[0], "there is no checkpoint in " + root));
  }
  fs::create_directories(dir / "run/step-00000003");
  const auto loaded = load(small_model(), two, dir / "run", 1);
  CHECK(loaded.told.unanimous(ErrorCode::bad_input));
  CHECK(contains(loaded.told.sentences[0], "no complete checkpoint"));
  CHECK(contains(loaded.told.sentences[0], "step-00000003/manifest.json cannot be opened"));
}

TEST_CASE("sharded: a checkpoint of another model, with the first difference") {
  TemporaryDirectory dir;
  const Layout two{Mesh{1, 1, 1, 2}};
  REQUIRE(save(small_model(), two, dir / "run", 1, 1).silent());
  const auto refused = [&](const Layers& model) {
    const auto told = on_ranks(model, two, [&](const auto& sharded, int) {
      try {
        ckpt::load_latest_checkpoint(sharded, dir / "run");
      } catch (...) {
        CHECK(untouched(sharded.store));
        throw;
      }
    });
    CHECK(told.unanimous(ErrorCode::bad_input));
    return told.sentences[0];
  };
  auto model = small_model();
  model[1][0].name = "d";
  CHECK(contains(refused(model), "it has no parameter 'd'"));
  model = small_model();
  model[0][0].shape = {7, 5};
  CHECK(contains(refused(model), "parameter 'a' has shape [5, 7] there and [7, 5] here"));
  model = small_model();
  model[0].pop_back();
  CHECK(contains(refused(model), "its parameter 'b' does not exist here"));
  model = small_model();
  model[1].push_back({.name = "e", .shape = {1}});
  CHECK(contains(refused(model), "it has no parameter 'e'"));
}

TEST_CASE("sharded: ranks that see different directories are told so") {
  TemporaryDirectory dir;
  const Layout three{Mesh{1, 1, 3, 1}};
  const auto saved = on_ranks(small_model(), three, [&](const auto& sharded, int rank) {
    ckpt::save_checkpoint(sharded, dir / (rank == 1 ? "b" : "a"), state_of(1), 1);
  });
  CHECK(saved.unanimous(ErrorCode::not_durable));
  CHECK(contains(saved.sentences[0], "rank 1: directory " + (dir / "b/.tmp-step-1-")));
  CHECK(contains(saved.sentences[0], "all ranks need one shared directory"));
  CHECK(first_temporary(dir / "a").empty());

  REQUIRE(save(small_model(), three, dir / "a", 1, 1).silent());
  const auto loaded = [&] {
    const auto told = on_ranks(small_model(), three, [&](const auto& sharded, int rank) {
      ckpt::load_latest_checkpoint(sharded, dir / (rank == 2 ? "b" : "a"));
    });
    CHECK(told.unanimous(ErrorCode::bad_input));
    CHECK(contains(told.sentences[0], "all ranks need one shared directory"));
    return told.sentences[0];
  };
  CHECK(contains(loaded(), "rank 2: checkpoint " + (dir / "b/step-00000001")));
  REQUIRE(save(small_model(), three, dir / "b", 1, 2).silent());
  CHECK(contains(loaded(), "it is another one"));

  // One file system under several names is one directory.
  fs::create_directory_symlink(dir / "a", dir / "link");
  CHECK(on_ranks(small_model(), three, [&](const auto& sharded, int rank) {
          fill(sharded.store, 5);
          const auto root = dir / (rank == 1 ? "link" : "a");
          CHECK(ckpt::save_checkpoint(sharded, root, state_of(2), 1) == root + "/step-00000002");
        }).silent());
  CHECK(load(small_model(), {}, dir / "a", 5).wrong == 0);
}

// Training resumes as if it had not been interrupted.

namespace {

using mega_test::RunOutcome;
using mega_test::RunSettings;

/// Trains on, from the latest checkpoint in `from` if there is one given, and saves into `to`.
template <class Device = mega::Host>
RunOutcome run(const RunSettings& s, int steps, const std::string& from, const std::string& to) {
  using Plan = mega_test::ResidualPlan<true, Device, mega::dpp::ScheduleTraversal<mega::dpp::DFC>>;
  RunOutcome outcome;
  std::mutex mutex;
  mega::run_threads(s.mesh.size(), [&](ThreadComm& world) {
    const int m = s.global_microbatches / s.mesh.data;
    const mega::data::FunctionBatch batch(m, s.shape.rows, s.shape.width, mega_test::sample,
                                          s.mesh.coordinates(world.rank())[mega::Axis::data]);
    typename mega::Trainer<Plan>::options_type options;
    options.mesh = s.mesh;
    options.chunks = s.chunks;
    options.microbatches = m;
    options.shard_optimizer = s.shard_optimizer;
    options.clip_norm = s.clip;
    options.seed = 42;
    mega::Trainer<Plan> trainer(
        world, options,
        [&](mega::StagePosition p) { return mega_test::ResidualStage<true>(s.shape, p); },
        Device());
    if (!from.empty()) {
      // A fresh trainer differs from the saved one in everything that a load has to bring.
      const auto loaded = ckpt::load_latest_checkpoint(trainer, from);
      CHECK(loaded.state.steps_done == trainer.steps_done());
      CHECK(loaded.state.consumed_samples == 18 * trainer.steps_done());
      CHECK(loaded.state.seed == 42);
    }
    for (int step = 0; step < steps; ++step) {
      const auto result = trainer.step(batch, 0.02);
      if (world.rank() == 0) outcome.losses.push_back(result.loss);
      if (world.rank() == 0) outcome.norms.push_back(result.gradient_norm);
    }
    ckpt::TrainingState state;
    state.consumed_samples = 18 * trainer.steps_done();
    if (!to.empty()) ckpt::save_checkpoint(trainer, to, state, 2);

    const std::lock_guard lock(mutex);
    const auto& store = trainer.parameters();
    for (const auto& e : store.table().entries()) {
      const auto v = store.values(e);
      const std::vector<float> now(v.data(), v.data() + v.size());
      CHECK(outcome.values.emplace(e.parameter.name, now).first->second == now);
      const auto& own = store.owned()[static_cast<std::size_t>(e.chunk)];
      const auto part = own.values.intersect({e.value, e.value + e.size});
      for (Index i = part.begin; i < part.end && !e.alias; ++i) {
        const auto at = static_cast<std::size_t>(i - e.value);
        auto& first = outcome.first_moments[e.parameter.name];
        auto& second = outcome.second_moments[e.parameter.name];
        first.resize(now.size());
        second.resize(now.size());
        first[at] = store.first_moments()(own.moments + i - own.values.begin);
        second[at] = store.second_moments()(own.moments + i - own.values.begin);
      }
    }
  });
  return outcome;
}

RunSettings settings(const Layout& layout, bool tied) {
  RunSettings s;
  s.mesh = layout.mesh;
  s.chunks = layout.chunks;
  s.shard_optimizer = layout.shard_optimizer;
  s.shape.tied = tied;
  return s;
}

const std::vector<Layout> training_layouts{
    {Mesh{1, 1, 1, 1}}, {Mesh{1, 1, 2, 1}},         {Mesh{1, 1, 2, 1}, 1, true},
    {Mesh{1, 1, 1, 2}}, {Mesh{1, 1, 1, 2}, 2},      {Mesh{1, 1, 2, 2}, 1, true},
    {Mesh{1, 1, 1, 3}}, {Mesh{1, 1, 3, 1}, 2, true}};

}  // namespace

TEST_CASE("sharded: 5 steps, save, load, 5 steps is bitwise 10 steps") {
  for (const bool tied : {false, true}) {
    for (const Layout& layout : training_layouts) {
      CAPTURE(to_string(layout));
      CAPTURE(tied);
      TemporaryDirectory dir;
      const auto s = settings(layout, tied);
      auto whole = run(s, 10, "", "");
      const auto half = run(s, 5, "", dir / "run");
      const auto resumed = run(s, 5, dir / "run", "");
      CHECK(whole.values != half.values);
      whole.losses.erase(whole.losses.begin(), whole.losses.begin() + 5);
      whole.norms.erase(whole.norms.begin(), whole.norms.begin() + 5);
      CHECK(whole == resumed);
    }
  }
}

TEST_CASE("sharded: resumed under another layout, training goes on bitwise where layouts agree") {
  // On the host, pp, chunks and optimizer sharding change no bit; a tied copy on another pipeline
  // rank has moments of its own, which must be the owner's.
  const std::vector<Layout> same_data{
      {Mesh{1, 1, 2, 1}, 1, true}, {Mesh{1, 1, 2, 2}}, {Mesh{1, 1, 2, 2}, 2, true}};
  for (const bool tied : {false, true}) {
    TemporaryDirectory dir;
    auto whole = run(settings(same_data[0], tied), 10, "", "");
    whole.first_moments.erase("layer.3.weight");
    whole.second_moments.erase("layer.3.weight");
    whole.losses.erase(whole.losses.begin(), whole.losses.begin() + 5);
    whole.norms.erase(whole.norms.begin(), whole.norms.begin() + 5);
    for (const Layout& before : same_data) {
      const std::string root = dir / to_string(before);
      run(settings(before, tied), 5, "", root);
      for (const Layout& after : same_data) {
        CAPTURE(to_string(before));
        CAPTURE(to_string(after));
        auto resumed = run(settings(after, tied), 5, root, "");
        if (tied && resumed.first_moments.contains("layer.3.weight"))
          CHECK(resumed.first_moments["layer.3.weight"] == resumed.first_moments["layer.0.weight"]);
        resumed.first_moments.erase("layer.3.weight");
        resumed.second_moments.erase("layer.3.weight");
        CHECK(whole == resumed);
      }
    }
  }
}

TEST_CASE("sharded: a device with asynchronous streams saves and loads the same bits") {
  TemporaryDirectory dir;
  const auto s = settings({Mesh{1, 1, 2, 2}, 1, true}, true);
  auto whole = run(s, 4, "", "");
  run<mega::HostAsync>(s, 2, "", dir / "run");
  const auto resumed = run<mega::HostAsync>(s, 2, dir / "run", "");
  CHECK(whole.values == resumed.values);
  CHECK(whole.second_moments == resumed.second_moments);
}

// Faults while saving.

namespace {

enum class Fault {
  none,
  no_space,
  exception,
  outage,  ///< no operation works from then on, cleaning up neither: what a kill leaves on the disk
  exit
};
struct Thrown {};

// The hook is a plain function, so what it does is told through these.
Fault fault = Fault::none;
std::uint64_t fault_at = 0;
std::atomic<std::uint64_t> operations{0};

int faulty(ckpt::FileOperation, const char*, std::uint64_t ordinal) {
  ++operations;
  if (fault == Fault::outage && ordinal > fault_at) return EIO;
  if (ordinal != fault_at) return 0;
  switch (fault) {
    case Fault::none: return 0;
    case Fault::outage: return EIO;
    case Fault::no_space: return ENOSPC;
    case Fault::exception: throw Thrown{};
    case Fault::exit: ::_exit(77);
  }
  return 0;
}
void arm(Fault kind, std::uint64_t ordinal) {
  fault = kind;
  fault_at = ordinal;
  operations = 0;
  ckpt::FileFaults::install(faulty);
}
void disarm() {
  ckpt::FileFaults::install(nullptr);
}

const Layout four_ranks{Mesh{1, 1, 2, 2}, 1, true};

/// Injects `kind` at every `stride`-th file operation of a save of step 6 over a complete step 5.
void survive_faults(Fault kind, int keep, std::uint64_t stride = 1) {
  TemporaryDirectory before;
  REQUIRE(save(small_model(), four_ranks, before / "run", 5, 1).silent());
  const auto prepare = [&](const std::string& root) {
    fs::copy(before / "run", root, fs::copy_options::recursive);
  };
  std::uint64_t total = 0;
  {
    TemporaryDirectory dir;
    prepare(dir / "run");
    arm(Fault::none, 0);
    REQUIRE(save(small_model(), four_ranks, dir / "run", 6, 2, keep).silent());
    disarm();
    total = operations;
  }
  REQUIRE(total > 40);
  int old_found = 0, new_found = 0;
  for (std::uint64_t at = 0; at < total; at += stride) {
    CAPTURE(at);
    TemporaryDirectory dir;
    const std::string root = dir / "run";
    prepare(root);
    bool new_promised = false, old_promised = false;
    if (kind == Fault::exit) {
      const auto child = ::fork();
      REQUIRE(child >= 0);
      if (child == 0) {
        arm(kind, at);
        save(small_model(), four_ranks, root, 6, 2, keep);
        ::_exit(0);
      }
      int status = -1;
      REQUIRE(::waitpid(child, &status, 0) == child);
      REQUIRE(WIFEXITED(status));
      CHECK(WEXITSTATUS(status) == 77);
    } else {
      arm(kind, at);
      const auto told = save(small_model(), four_ranks, root, 6, 2, keep);
      disarm();
      CHECK((told.silent() || told.unanimous(ErrorCode::not_durable)));
      new_promised = told.silent() || contains(told.sentences[0], "is complete");
      // A name may have changed although the flush behind it failed: then either may be found.
      old_promised =
          !new_promised && kind == Fault::no_space && contains(told.sentences[0], ".safetensors");
      CHECK((told.silent() || contains(told.sentences[0], "rank ")));
    }
    const auto loaded = load(small_model(), {Mesh{1, 1, 1, 2}}, root, 1, 2);
    REQUIRE_MESSAGE(loaded.told.silent(), loaded.told.sentences[0]);
    CHECK(loaded.skipped.empty());
    const bool is_old = loaded.step == 5 && loaded.wrong == 0;
    const bool is_new = loaded.step == 6 && loaded.wrong_other == 0;
    CHECK(is_old != is_new);
    if (new_promised) CHECK(is_new);
    if (old_promised) CHECK(is_old);
    old_found += is_old;
    new_found += is_new;

    if (at / stride % 4 != 0) continue;
    REQUIRE(save(small_model(), {}, root, 7, 3, 2).silent());
    CHECK(load(small_model(), {}, root, 3).wrong == 0);
    CHECK(first_temporary(root).empty());
  }
  CHECK(old_found > 40 / static_cast<int>(stride));
  CHECK(new_found >= 1);
}

}  // namespace

TEST_CASE(
    "sharded: whatever file operation of any rank is the last, a complete checkpoint is left") {
  survive_faults(Fault::outage, 1);
}
TEST_CASE("sharded: killed at a file operation of any rank, a complete checkpoint is left") {
  survive_faults(Fault::exit, 1, 5);
}
TEST_CASE("sharded: a full disk at a file operation of any rank fails all ranks alike") {
  survive_faults(Fault::no_space, 1, 3);
}
TEST_CASE("sharded: any exception at a file operation fails all ranks alike") {
  survive_faults(Fault::exception, 0, 4);
}

TEST_CASE("sharded: a full disk under one rank") {
  TemporaryDirectory dir;
  REQUIRE(save(small_model(), four_ranks, dir / "run", 5, 1).silent());
  ckpt::FileFaults::install([](ckpt::FileOperation operation, const char* path, std::uint64_t) {
    return operation == ckpt::FileOperation::write && contains(path, "rank-00002") ? ENOSPC : 0;
  });
  const auto told = save(small_model(), four_ranks, dir / "run", 6, 2, 1);
  ckpt::FileFaults::install(nullptr);
  CHECK(told.unanimous(ErrorCode::not_durable));
  CHECK(told.sentences[3].starts_with("rank 2: file "));
  CHECK(contains(told.sentences[3], "No space left on device"));
  CHECK(ckpt::list_directory(dir / "run") == std::vector<std::string>{"latest", "step-00000005"});
  CHECK(load(small_model(), four_ranks, dir / "run", 1).wrong == 0);

  // A root that cannot be made.
  const auto impossible = save(small_model(), four_ranks, dir.write("file", ""), 6, 2, 1);
  CHECK(impossible.unanimous(ErrorCode::not_durable));
}

TEST_CASE("sharded: what cannot be read back replaces nothing") {
  TemporaryDirectory dir;
  static std::string victim;
  victim.clear();
  REQUIRE(save(small_model(), four_ranks, dir / "run", 5, 1).silent());
  // While rank 1's file is flushed, a byte of it changes on the disk.
  ckpt::FileFaults::install([](ckpt::FileOperation operation, const char* path, std::uint64_t) {
    if (operation == ckpt::FileOperation::flush && contains(path, "rank-00001")) {
      std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
      file.seekp(-1, std::ios::end);
      file.put('\x5a');
    }
    return 0;
  });
  const auto told = save(small_model(), four_ranks, dir / "run", 6, 2, 1);
  ckpt::FileFaults::install(nullptr);
  CHECK(told.unanimous(ErrorCode::not_durable));
  CHECK(contains(told.sentences[0], "rank 0: file "));  // the one that reads rank 1's file
  CHECK(contains(told.sentences[0], "checksum"));
  CHECK(load(small_model(), four_ranks, dir / "run", 1).step == 5);
}

// Damage and hostility.

TEST_CASE("sharded: damage is found before anything is loaded") {
  struct Damage {
    std::string_view reason;
    std::function<void(const std::string& file)> apply;
  };
  const Damage damages[] = {
      {"has checksum",
       [](const std::string& f) {
         auto text = content_of(f);
         text[text.size() - 3] = static_cast<char>(text[text.size() - 3] ^ 1);
         std::ofstream(f, std::ios::binary) << text;
       }},
      {"bytes but its manifest says",
       [](const std::string& f) { fs::resize_file(f, fs::file_size(f) - 1); }},
      {"cannot be opened", [](const std::string& f) { fs::remove(f); }}};
  for (const Damage& damage : damages) {
    for (const std::string file : {"rank-00000.safetensors", "rank-00003.safetensors"}) {
      CAPTURE(damage.reason);
      TemporaryDirectory dir;
      REQUIRE(save(small_model(), four_ranks, dir / "run", 5, 1).silent());
      REQUIRE(save(small_model(), four_ranks, dir / "run", 6, 2).silent());
      const auto path = dir / "run/step-00000006";
      damage.apply(path + "/" + file);
      for (const Layout& layout : {Layout{}, four_ranks}) {
        const auto direct = on_ranks(small_model(), layout, [&](const auto& sharded, int) {
          try {
            ckpt::load_checkpoint(sharded, path);
          } catch (...) {
            CHECK(untouched(sharded.store));
            throw;
          }
        });
        CHECK(direct.unanimous(ErrorCode::bad_input));
        CHECK(contains(direct.sentences[0], damage.reason));
        CHECK(contains(direct.sentences[0], file));
        // The one before is complete; what was passed over is told.
        const auto loaded = load(small_model(), layout, dir / "run", 1);
        CHECK(loaded.told.silent());
        CHECK(loaded.step == 5);
        CHECK(loaded.wrong == 0);
        REQUIRE(loaded.skipped.size() == 1);
        CHECK(loaded.skipped[0].path == path);
        CHECK(contains(loaded.skipped[0].reason, damage.reason));
      }
    }
  }
}

namespace {

/// A checkpoint in memory, to be changed and written again with right checksums.
struct Forgery {
  struct Tensor {
    ckpt::TensorSpec spec;
    std::vector<std::byte> bytes;
  };
  std::vector<std::vector<Tensor>> files;
  nlohmann::json user;

  explicit Forgery(const ckpt::Checkpoint& from) : user(from.manifest.user) {
    for (const auto& record : from.manifest.files) {
      const ckpt::SafetensorsReader reader(from.file(record.name));
      auto& file = files.emplace_back();
      for (const bool wide : {true, false}) {
        for (const auto& t : reader.tensors()) {
          if (wide != t.name.starts_with("runs/")) continue;
          file.push_back({{t.name, t.dtype, t.shape}, {}});
          file.back().bytes.resize(static_cast<std::size_t>(t.bytes));
          reader.read(t, file.back().bytes);
        }
      }
    }
  }

  std::string write(const std::string& root) const {
    ckpt::CheckpointWriter writer(root, 5);
    std::vector<ckpt::FileRecord> records;
    for (std::size_t f = 0; f < files.size(); ++f) {
      std::vector<ckpt::TensorSpec> specs;
      for (const auto& t : files[f]) specs.push_back(t.spec);
      ckpt::SafetensorsWriter file(writer.add_file("f" + std::to_string(f)), specs);
      for (const auto& t : files[f]) file.write(t.spec.name, t.bytes);
      records.push_back(file.finish());
    }
    return writer.commit(records, user);
  }

  Tensor& at(std::size_t file, std::string_view name) {
    for (auto& t : files.at(file))
      if (t.spec.name == name) return t;
    throw std::logic_error("no such tensor in this forgery");
  }
  void set_run(std::size_t file, std::string_view name, std::size_t number, Index to) {
    std::memcpy(at(file, name).bytes.data() + 8 * number, &to, sizeof to);
  }
  /// Gives a tensor another shape, and zeros.
  void reshape(std::size_t file, std::string_view name, ckpt::DType dtype,
               std::vector<Index> shape) {
    auto& t = at(file, name);
    Index bytes = ckpt::element_bytes(dtype);
    for (const Index extent : shape) bytes *= extent;
    t.spec.dtype = dtype;
    t.spec.shape = std::move(shape);
    t.bytes.assign(static_cast<std::size_t>(bytes), std::byte{0});
  }
};

/// What the ranks of each layout say to it.
std::vector<std::string> load_forgery(const Forgery& forgery, const std::vector<Layout>& layouts) {
  TemporaryDirectory dir;
  const auto path = forgery.write(dir / "run");
  std::vector<std::string> out;
  for (const Layout& layout : layouts) {
    const auto told = on_ranks(small_model(), layout, [&](const auto& sharded, int) {
      try {
        ckpt::load_checkpoint(sharded, path);
        CHECK(wrong_elements(sharded.store, 1) == 0);
      } catch (...) {
        CHECK(untouched(sharded.store));
        throw;
      }
    });
    CHECK((told.silent() || told.unanimous(ErrorCode::bad_input)));
    out.push_back(told.sentences[0]);
  }
  return out;
}

}  // namespace

TEST_CASE("sharded: a forged checkpoint is refused with the place and the reason") {
  // Region [0, 64): 'a' of 35 elements at 0, 'b' of 3 at 48. So file 0 holds a[0, 32), file 1 the
  // rest; 'c' of 33 elements lies in a region of 64 alone: file 2 [0, 32), file 3 [32, 33).
  TemporaryDirectory dir;
  REQUIRE(save(small_model(), four_ranks, dir / "run", 5, 1).silent());
  const Forgery good(*ckpt::latest_complete(dir / "run").found);
  REQUIRE(good.files.size() == 4);
  CHECK(load_forgery(good, {four_ranks}) == std::vector<std::string>{""});

  const Index huge = Index{1} << 62;
  using Change = std::function<void(Forgery&)>;
  const std::vector<std::pair<std::string, Change>> changes{
      {"parameter 'a': element 31 is stored twice, in f0 and in f1",
       [](Forgery& f) { f.set_run(1, "runs/a", 0, 31); }},
      {"parameter 'a': elements 0 to 0 of 35 are in no file",
       [](Forgery& f) { f.set_run(0, "runs/a", 0, 1); }},
      {"parameter 'c': elements 30 to 31 of 33 are in no file",
       [](Forgery& f) {
         f.set_run(2, "runs/c", 1, 30);
         for (const auto* kind : {"value/c", "first_moment/c", "second_moment/c"})
           f.reshape(2, kind, ckpt::DType::f32, {30});
       }},
      {"parameter 'c': elements 32 to 32 of 33 are in no file",
       [](Forgery& f) {
         f.user["parameters"][2]["files"] = {2};
         f.files[3].clear();
       }},
      {"tensor 'runs/a': run 0 of 32 elements from element -1 does not lie in a tensor of 35",
       [](Forgery& f) { f.set_run(0, "runs/a", 0, -1); }},
      {"run 0 of 32 elements from element 4611686018427387904",
       [=](Forgery& f) { f.set_run(0, "runs/a", 0, huge); }},
      {"run 0 of -32 elements", [](Forgery& f) { f.set_run(0, "runs/a", 1, -32); }},
      {"run 0 of 0 elements", [](Forgery& f) { f.set_run(0, "runs/a", 1, 0); }},
      {"run 0 of 9223372036854775807 elements",
       [](Forgery& f) { f.set_run(1, "runs/a", 1, std::numeric_limits<Index>::max()); }},
      {"tensor 'value/a': the runs need F32 [31], not F32 [32]",
       [](Forgery& f) { f.set_run(0, "runs/a", 1, 31); }},
      {"its runs have more elements than the tensor's 3",
       [](Forgery& f) {
         f.reshape(1, "runs/b", ckpt::DType::i64, {2, 2});
         for (const std::size_t i : {1, 3}) f.set_run(1, "runs/b", i, 2);
       }},
      {"runs are I64 of shape [n, 2], not I64 [2, 1]",
       [](Forgery& f) {
         f.reshape(0, "runs/a", ckpt::DType::i64, {2, 1});
       }},
      {"runs are I64 of shape [n, 2], not F64 [1, 2]",
       [](Forgery& f) {
         f.reshape(0, "runs/a", ckpt::DType::f64, {1, 2});
       }},
      {"tensor 'second_moment/a': the runs need F32 [32], not F32 [4, 8]",
       [](Forgery& f) {
         f.at(0, "second_moment/a").spec.shape = {4, 8};
       }},
      {"tensor 'value/c': the runs need F32 [32], not BF16 [32]",
       [](Forgery& f) {
         f.reshape(2, "value/c", ckpt::DType::bf16, {32});
         std::rotate(f.files[2].begin() + 1,
                     std::find_if(f.files[2].begin(), f.files[2].end(),
                                  [](auto& t) { return t.spec.name == "value/c"; }),
                     f.files[2].end());
       }},
      {"holds no tensor 'first_moment/b'",
       [](Forgery& f) {
         std::erase_if(f.files[1], [](auto& t) { return t.spec.name == "first_moment/b"; });
       }},
      {"holds no tensor 'runs/c'",
       [](Forgery& f) {
         std::erase_if(f.files[3], [](auto& t) { return t.spec.name == "runs/c"; });
       }},
      {"f3: tensor 'value/x' is not among those",
       [](Forgery& f) {
         f.files[3].push_back({{"value/x", ckpt::DType::f32, {0}}, {}});
       }},
      {"f3: tensor 'value/a' is not among those",
       [](Forgery& f) {
         f.files[3].push_back({{"value/a", ckpt::DType::f32, {0}}, {}});
       }},
      {"f0: tensor 'a' is not among those",
       [](Forgery& f) {
         f.files[0].push_back({{"a", ckpt::DType::f32, {0}}, {}});
       }},
      {"f3: tensor 'first_moment/c' is not among those",
       [](Forgery& f) { f.user["parameters"][2]["files"] = {2}; }},
      {"parameter 'a': it is said to be in file 4 of 4",
       [](Forgery& f) {
         f.user["parameters"][0]["files"] = {0, 4};
       }},
      {"parameter 'a': its files 1, 0 are not ascending",
       [](Forgery& f) {
         f.user["parameters"][0]["files"] = {1, 0};
       }},
      {"parameter 'a': its files 0, 0 are not ascending",
       [](Forgery& f) {
         f.user["parameters"][0]["files"] = {0, 0};
       }},
      {"'files' holds '-1'", [](Forgery& f) { f.user["parameters"][0]["files"] = {-1}; }},
      {"'shape' holds '1.5'", [](Forgery& f) { f.user["parameters"][0]["shape"] = {1.5}; }},
      {"'shape' holds '18446744073709551615'",
       [](Forgery& f) {
         f.user["parameters"][0]["shape"] = {std::numeric_limits<std::uint64_t>::max()};
       }},
      {"parameter 'a': shape [4611686018427387904, 4] exceeds",
       [=](Forgery& f) {
         f.user["parameters"][0]["shape"] = {huge, 4};
       }},
      {"parameter 'a' has shape [5, 8] there and [5, 7] here",
       [](Forgery& f) {
         f.user["parameters"][0]["shape"] = {5, 8};
       }},
      {"parameter 'b': it is listed twice",
       [](Forgery& f) { f.user["parameters"][0]["name"] = "b"; }},
      {"'name' is not a string", [](Forgery& f) { f.user["parameters"][0]["name"] = 1; }},
      {"an item of 'parameters' is not a JSON object",
       [](Forgery& f) { f.user["parameters"][0] = "a"; }},
      {"'parameters' is not an array", [](Forgery& f) { f.user["parameters"] = "a"; }},
      {"it has no parameter 'c'", [](Forgery& f) { f.user["parameters"].erase(2); }},
      {"key 'state' is missing", [](Forgery& f) { f.user.erase("state"); }},
      {"key 'model' is missing", [](Forgery& f) { f.user.erase("model"); }},
      {"'seed' is not an integer", [](Forgery& f) { f.user["state"]["seed"] = -1; }},
      {"'consumed_samples' holds '1e+300'",
       [](Forgery& f) { f.user["state"]["consumed_samples"] = 1e300; }},
      {"the state is that of step 6 in a checkpoint of step 5",
       [](Forgery& f) { f.user["state"]["steps_done"] = 6; }},
      {"sharded version 2 is unknown", [](Forgery& f) { f.user["sharded_version"] = 2; }},
  };
  for (const auto& [reason, change] : changes) {
    Forgery forged = good;
    change(forged);
    for (const auto& told : load_forgery(forged, {Layout{}, Layout{Mesh{1, 1, 1, 2}}})) {
      CAPTURE(reason);
      CAPTURE(told);
      CHECK(contains(told, reason));
    }
  }
}

TEST_CASE("sharded: any change to any number of any run is refused") {
  TemporaryDirectory dir;
  REQUIRE(save(small_model(), four_ranks, dir / "run", 5, 1).silent());
  const Forgery good(*ckpt::latest_complete(dir / "run").found);
  const mega::RandomKey random{.seed = 9, .use = mega::RandomUse::test};
  Index draw = 0;
  for (std::size_t f = 0; f < good.files.size(); ++f) {
    for (const auto& t : good.files[f]) {
      if (!t.spec.name.starts_with("runs/")) continue;
      for (std::size_t n = 0; n < t.bytes.size() / 8; ++n) {
        Index now = 0;
        std::memcpy(&now, t.bytes.data() + 8 * n, sizeof now);
        for (const int bit : {0, static_cast<int>(random.bits(draw++) % 64)}) {
          Forgery forged = good;
          const auto flipped = static_cast<std::uint64_t>(now) ^ (std::uint64_t{1} << bit);
          forged.set_run(f, t.spec.name, n, static_cast<Index>(flipped));
          CHECK(load_forgery(forged, {Layout{}}) != std::vector<std::string>{""});
        }
      }
    }
  }
  CHECK(draw >= 10);
}

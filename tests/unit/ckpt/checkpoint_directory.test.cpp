/// @file  Tests of ckpt/checkpoint_directory.hpp: the protocol, damage, and a fault at every call.
#include "../../support/temporary_directory.hpp"
#include <mega/ckpt/checkpoint_directory.hpp>
#include <mega/ckpt/safetensors.hpp>

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace ckpt = mega::ckpt;
namespace fs = std::filesystem;
using ckpt::FileOperation;
using ckpt::Verify;
using mega::ErrorCode;
using mega::Index;
using mega::tests::contains;
using mega::tests::content_of;
using mega::tests::sentence_of;
using mega::tests::TemporaryDirectory;
using mega::tests::throws_code;

namespace {

/// Two ranks' files and a commit; `mark` tells the saves of one step apart.
std::string save(const std::string& root, Index step, float mark = 0) {
  ckpt::CheckpointWriter coordinator(root, step);
  auto member = ckpt::CheckpointWriter::join(coordinator.directory());
  std::vector<ckpt::FileRecord> files;

  ckpt::SafetensorsWriter weights(coordinator.add_file("rank0.safetensors"),
                                  {{"w", ckpt::DType::f32, {2}}});
  const float values[2] = {static_cast<float>(step), mark};
  weights.write("w", std::as_bytes(std::span(values)));
  files.push_back(weights.finish());

  auto raw = member.add_file("rank1.bin");
  const std::string text = "step " + std::to_string(step);
  raw.write(std::as_bytes(std::span(text)));
  files.push_back(raw.finish());
  return coordinator.commit(files, {{"consumed_samples", step * 10}, {"lr", 0.1}});
}

/// What the checkpoint holds: (step, mark). The content must agree with its manifest.
std::pair<Index, float> content(const ckpt::Checkpoint& checkpoint) {
  float values[2] = {};
  ckpt::SafetensorsReader(checkpoint.file("rank0.safetensors")).read_f32("w", values);
  const auto step = checkpoint.manifest.step;
  CHECK(values[0] == static_cast<float>(step));
  CHECK(content_of(checkpoint.file("rank1.bin")) == "step " + std::to_string(step));
  CHECK(checkpoint.manifest.user.at("consumed_samples") == step * 10);
  return {step, values[1]};
}

std::vector<std::string> temporaries(const std::string& root) {
  std::vector<std::string> out;
  for (const auto& name : ckpt::list_directory(root)) {
    if (name.starts_with(".") || contains(name, "replaced")) out.push_back(name);
  }
  return out;
}

// The hook is a plain function, so what it does is told through these.
enum class Fault { none, no_space, exception, exit };
Fault fault = Fault::none;
std::uint64_t fault_at = 0;
std::uint64_t operations = 0;
struct Thrown {};

int faulty(FileOperation, const char*, std::uint64_t ordinal) {
  operations = ordinal + 1;
  if (ordinal != fault_at) return 0;
  switch (fault) {
    case Fault::none: return 0;
    case Fault::no_space: return ENOSPC;
    case Fault::exception: throw Thrown{};
    case Fault::exit: ::_exit(77);
  }
  return 0;
}

void arm(Fault kind, std::uint64_t ordinal) {
  fault = kind;
  fault_at = ordinal;
  ckpt::FileFaults::install(faulty);
}
void disarm() {
  ckpt::FileFaults::install(nullptr);
}

/// File operations of one save of `step` into a root that `prepare` has filled.
template <class Prepare>
std::uint64_t count_operations(Prepare prepare, Index step) {
  TemporaryDirectory dir;
  prepare(dir / "run");
  arm(Fault::none, 0);
  save(dir / "run", step);
  disarm();
  return operations;
}

/// Injects `kind` at every operation of a save of `step` with mark 1, and requires that afterwards
/// either the state before (`old_step`, mark 0) or the new one is the latest complete.
template <class Prepare>
void survive_every_operation(Fault kind, Prepare prepare, Index old_step, Index step) {
  const auto total = count_operations(prepare, step);
  REQUIRE(total > 15);
  int old_found = 0, new_found = 0;
  for (std::uint64_t at = 0; at < total; ++at) {
    CAPTURE(at);
    TemporaryDirectory dir;
    const std::string root = dir / "run";
    prepare(root);
    bool said_durable = false, said_complete = false;
    if (kind == Fault::exit) {
      const auto child = ::fork();
      REQUIRE(child >= 0);
      if (child == 0) {
        arm(kind, at);
        try {
          save(root, step, 1);
        } catch (...) {
          ::_exit(1);
        }
        ::_exit(0);
      }
      int status = -1;
      REQUIRE(::waitpid(child, &status, 0) == child);
      REQUIRE(WIFEXITED(status));
      CHECK(WEXITSTATUS(status) == 77);
    } else {
      arm(kind, at);
      try {
        save(root, step, 1);
        said_durable = true;
      } catch (const mega::Error& error) {
        CHECK(kind == Fault::no_space);
        CHECK(error.code() == ErrorCode::not_durable);
        said_complete = contains(error.what(), "is complete");
      } catch (const Thrown&) {
        CHECK(kind == Fault::exception);
      }
      disarm();
    }

    const auto latest = ckpt::latest_complete(root);
    REQUIRE(latest.found.has_value());
    CHECK(latest.skipped.empty());
    const auto found = content(*latest.found);
    const bool is_old = found == std::pair<Index, float>{old_step, 0.0f};
    const bool is_new = found == std::pair<Index, float>{step, 1.0f};
    CHECK(is_old != is_new);
    if (said_durable || said_complete) CHECK(is_new);
    old_found += is_old;
    new_found += is_new;

    // The next save works, is found, and leaves nothing of the interrupted one.
    save(root, step + 1, 2);
    const auto next = ckpt::latest_complete(root);
    REQUIRE(next.found.has_value());
    CHECK(content(*next.found) == std::pair<Index, float>{step + 1, 2.0f});
    CHECK(content_of(root + "/latest") == fs::path(next.found->path).filename().string() + "\n");
    for (const auto& name : temporaries(root)) CHECK_FALSE(name.starts_with("."));
  }
  // The switch from old to new happens somewhere inside, so both were seen.
  CHECK(old_found > 5);
  CHECK(new_found > 1);
}

const auto one_before = [](const std::string& root) { save(root, 1); };

}  // namespace

TEST_CASE("checkpoint: what is saved is found") {
  TemporaryDirectory dir;
  const std::string root = dir / "runs/a";  // made with its parent
  const auto path = save(root, 7);
  CHECK(path == root + "/step-00000007");
  CHECK(content_of(root + "/latest") == "step-00000007\n");
  CHECK(temporaries(root).empty());
  const auto latest = ckpt::latest_complete(root);
  REQUIRE(latest.found.has_value());
  CHECK(latest.found->path == path);
  CHECK(latest.found->manifest.serial == 1);
  CHECK(latest.found->manifest.user.at("lr") == 0.1);
  CHECK(content(*latest.found).first == 7);
  CHECK(latest.found->manifest.files[1] ==
        ckpt::FileRecord{"rank1.bin", 6, XXH3_64bits("step 7", 6)});
  CHECK(latest.skipped.empty());
}

TEST_CASE("checkpoint: nothing saved is no error") {
  TemporaryDirectory dir;
  CHECK_FALSE(ckpt::latest_complete(dir / "absent").found.has_value());
  CHECK_FALSE(ckpt::latest_complete(dir.path()).found.has_value());
  CHECK(throws_code(ErrorCode::bad_input,
                    [&] { (void)ckpt::latest_complete(dir.write("file", "")); }));
  ckpt::make_directory(dir / "run");
  ckpt::make_directory(dir / "run/step-1");  // not the canonical spelling
  ckpt::make_directory(dir / "run/step-0000000x");
  const auto latest = ckpt::latest_complete(dir / "run");
  CHECK_FALSE(latest.found.has_value());
  CHECK(latest.skipped.empty());
}

TEST_CASE("checkpoint: the newest is the one committed last, not the one with the highest step") {
  TemporaryDirectory dir;
  save(dir.path(), 100);
  save(dir.path(), 20);  // training went back to an earlier step
  CHECK(content(*ckpt::latest_complete(dir.path()).found).first == 20);
  const auto removed = ckpt::retain(dir.path(), 1);
  REQUIRE(removed.size() == 1);
  CHECK(removed[0] == dir / "step-00000100");
  CHECK(content(*ckpt::latest_complete(dir.path()).found).first == 20);
}

TEST_CASE("checkpoint: steps beyond eight digits, and impossible ones") {
  TemporaryDirectory dir;
  CHECK(save(dir.path(), 123'456'789'012) == dir / "step-123456789012");
  CHECK(ckpt::latest_complete(dir.path()).found->manifest.step == 123'456'789'012);
  CHECK(throws_code(ErrorCode::usage, [&] { ckpt::CheckpointWriter w(dir.path(), -1); }));
  CHECK(
      throws_code(ErrorCode::usage, [&] { ckpt::CheckpointWriter w(dir.path(), Index{1} << 62); }));
  CHECK(throws_code(ErrorCode::not_durable,
                    [&] { ckpt::CheckpointWriter w(dir.write("file", ""), 1); }));
}

TEST_CASE("checkpoint: damage is passed over and reported, and the one before is found") {
  struct Damage {
    std::string_view reason;
    void (*apply)(const std::string& checkpoint);
    bool needs_checksums = false;
  };
  static const auto rewrite = [](const std::string& path, auto change) {
    auto text = content_of(path);
    change(text);
    std::ofstream(path, std::ios::binary) << text;
  };
  const Damage damages[] = {
      {"cannot be opened", [](const std::string& c) { fs::remove(c + "/manifest.json"); }},
      {"not valid JSON", [](const std::string& c) { fs::resize_file(c + "/manifest.json", 40); }},
      {"not valid JSON", [](const std::string& c) { fs::resize_file(c + "/manifest.json", 0); }},
      {"own checksum",
       [](const std::string& c) {
         rewrite(c + "/manifest.json", [](auto& t) { t.replace(t.find("20"), 2, "21"); });
       }},
      {"cannot be opened", [](const std::string& c) { fs::remove(c + "/rank1.bin"); }},
      {"has 5 bytes but its manifest says 6",
       [](const std::string& c) { fs::resize_file(c + "/rank1.bin", 5); }},
      {"has 7 bytes", [](const std::string& c) { fs::resize_file(c + "/rank1.bin", 7); }},
      {"cannot be opened",
       [](const std::string& c) {
         fs::rename(c + "/rank1.bin", c + "/elsewhere");
         fs::create_symlink(c + "/elsewhere", c + "/rank1.bin");
       }},
      {"not a regular file",
       [](const std::string& c) {
         fs::remove(c + "/rank1.bin");
         fs::create_directory(c + "/rank1.bin");
       }},
      {"holds the manifest of step 1",
       [](const std::string& c) {
         fs::copy_file(fs::path(c).parent_path() / "step-00000001/manifest.json",
                       c + "/manifest.json", fs::copy_options::overwrite_existing);
       }},
      {"has checksum",
       [](const std::string& c) {
         rewrite(c + "/rank0.safetensors", [](auto& t) { t.back() ^= 1; });
       },
       true},
  };
  for (const auto& damage : damages) {
    CAPTURE(damage.reason);
    TemporaryDirectory dir;
    save(dir.path(), 1);
    const auto newest = save(dir.path(), 2);
    damage.apply(newest);
    const auto latest = ckpt::latest_complete(dir.path());
    REQUIRE(latest.found.has_value());
    CHECK(content(*latest.found).first == 1);
    REQUIRE(latest.skipped.size() == 1);
    CHECK(latest.skipped[0].path == newest);
    CAPTURE(latest.skipped[0].reason);
    CHECK(contains(latest.skipped[0].reason, damage.reason));
    CHECK(ckpt::latest_complete(dir.path(), Verify::sizes).found->manifest.step ==
          (damage.needs_checksums ? 2 : 1));

    // With the newest damaged, the one before is what retain() keeps.
    CHECK(ckpt::retain(dir.path(), 1).empty());
    CHECK(content(*ckpt::latest_complete(dir.path()).found).first == 1);
  }
}

TEST_CASE("checkpoint: hostile manifests are refused") {
  TemporaryDirectory dir;
  const std::string path = save(dir.path(), 3);
  const auto good = nlohmann::json::parse(content_of(path + "/manifest.json"));
  const auto sealed = [&](nlohmann::json json) {  // with the right checksum over the wrong content
    json.erase("manifest_xxh3");
    const auto body = json.dump();
    json["manifest_xxh3"] = ckpt::detail::hex(XXH3_64bits(body.data(), body.size()));
    std::ofstream(path + "/manifest.json", std::ios::binary) << json.dump();
    return sentence_of([&] { (void)ckpt::read_manifest(path); });
  };
  CHECK(sealed(good).empty());
  for (const auto* name : {"../../etc/passwd", "/etc/passwd", "..", ".", "", "a/b", ".hidden",
                           "manifest.json", "a\\b", "a b", "tab\t", "caf\xC3\xA9"}) {
    CAPTURE(name);
    auto json = good;
    json["files"][0]["name"] = name;
    CHECK(contains(sealed(json), "is not plain"));
  }
  const auto with = [&](const char* key, nlohmann::json value) {
    auto json = good;
    json[key] = std::move(value);
    return sealed(json);
  };
  const auto with_file = [&](const char* key, nlohmann::json value) {
    auto json = good;
    json["files"][1][key] = std::move(value);
    return sealed(json);
  };
  CHECK(contains(with("format", "other"), "not a mega checkpoint"));
  CHECK(contains(with("version", 2), "version 2 is unknown"));
  CHECK(contains(with("step", -1), "'step' is not an integer"));
  CHECK(contains(with("step", 1.5), "'step' is not an integer"));
  CHECK(contains(with("step", "3"), "'step' is not an integer"));
  CHECK(contains(with("step", std::uint64_t{1} << 63), "'step' is not an integer"));
  CHECK(contains(with("user", 1), "'user' is not an object"));
  CHECK(contains(with("files", "x"), "'files' is not an array"));
  CHECK(contains(with("files", {1}), "'name' is missing"));
  CHECK(contains(with_file("bytes", -1), "'bytes' is not an integer"));
  CHECK(contains(with_file("xxh3", "12"), "16 lower-case hexadecimal"));
  CHECK(contains(with_file("xxh3", "000000000000000G"), "16 lower-case hexadecimal"));
  CHECK(contains(with_file("xxh3", 5), "'xxh3' is not a string"));
  CHECK(contains(with_file("name", "rank0.safetensors"), "is listed twice"));
  auto without = good;
  without.erase("serial");
  CHECK(contains(sealed(without), "'serial' is missing"));

  const auto raw = [&](const std::string& text) {
    std::ofstream(path + "/manifest.json", std::ios::binary) << text;
    return sentence_of([&] { (void)ckpt::read_manifest(path); });
  };
  CHECK(contains(raw("[]"), "'format' is missing"));
  CHECK(contains(raw("null"), "'format' is missing"));
  CHECK(contains(raw(std::string(512'000, '[')), "deeper than 64"));
  CHECK(contains(raw(R"({"format":"a","format":"b"})"), "appears twice"));
  fs::resize_file(path + "/manifest.json", ckpt::detail::manifest_limit + 1);
  CHECK(contains(raw(std::string(static_cast<std::size_t>(ckpt::detail::manifest_limit) + 1, ' ')),
                 "more than"));
}

TEST_CASE("checkpoint: what could not be read back is not committed") {
  TemporaryDirectory dir;
  const auto commit = [&](nlohmann::json user) {
    ckpt::CheckpointWriter writer(dir.path(), 1);
    writer.commit({}, std::move(user));
  };
  nlohmann::json deep = nlohmann::json::object();
  for (int i = 0; i < 70; ++i) deep = nlohmann::json{{"a", deep}};
  CHECK(throws_code(ErrorCode::usage, [&] { commit({{"loss", std::nan("")}}); }));
  CHECK(throws_code(ErrorCode::usage, [&] { commit({{"text", "\xff"}}); }));
  CHECK(throws_code(ErrorCode::usage, [&] { commit(nlohmann::json::array()); }));
  CHECK(throws_code(ErrorCode::bad_input, [&] { commit(deep); }));
  CHECK_FALSE(ckpt::latest_complete(dir.path()).found.has_value());
  CHECK(temporaries(dir.path()).empty());
  commit({{"seed", ~std::uint64_t{0}}, {"x", 1e-300}, {"negative", -5}});
  const auto user = ckpt::latest_complete(dir.path()).found->manifest.user;
  CHECK(user.at("seed") == ~std::uint64_t{0});
  CHECK(user.at("x") == 1e-300);
}

TEST_CASE("checkpoint: records must agree with the files") {
  TemporaryDirectory dir;
  ckpt::CheckpointWriter writer(dir.path(), 1);
  auto member = ckpt::CheckpointWriter::join(writer.directory());
  CHECK(throws_code(ErrorCode::logic, [&] { (void)member.commit({}); }));
  CHECK(throws_code(ErrorCode::logic, [&] { (void)writer.add_file("../x"); }));
  CHECK(throws_code(ErrorCode::logic, [&] { (void)writer.add_file("manifest.json"); }));
  auto file = writer.add_file("a");
  CHECK(throws_code(ErrorCode::not_durable, [&] { (void)member.add_file("a"); }));
  file.write(std::as_bytes(std::span("12345", 5)));
  const auto record = file.finish();
  CHECK(throws_code(ErrorCode::logic, [&] { writer.commit({record, record}); }));
  CHECK(throws_code(ErrorCode::not_durable, [&] { writer.commit({{"absent", 0, 0}}); }));
  CHECK(throws_code(ErrorCode::not_durable, [&] { writer.commit({{"a", 4, record.xxh3}}); }));
  CHECK_FALSE(ckpt::latest_complete(dir.path()).found.has_value());
  writer.commit({record});
  CHECK(throws_code(ErrorCode::logic, [&] { writer.commit({record}); }));
  CHECK(ckpt::latest_complete(dir.path()).found.has_value());
}

TEST_CASE("checkpoint: an uncommitted save leaves nothing, an interrupted one is ignored") {
  TemporaryDirectory dir;
  {
    ckpt::CheckpointWriter writer(dir.path(), 1);
    auto file = writer.add_file("a");
    (void)file.finish();
    ckpt::CheckpointWriter moved(std::move(writer));
    CHECK(fs::exists(moved.directory()));
  }
  CHECK(ckpt::list_directory(dir.path()).empty());
  ckpt::make_directories(dir / ".tmp-step-9-0123456789abcdef");
  dir.write(".tmp-step-9-0123456789abcdef/rank0", "half");
  dir.write(".tmp-latest-0123456789abcdef", "ste");
  dir.write("notes.txt", "mine");
  ckpt::make_directory(dir / ".tmp-other");
  CHECK_FALSE(ckpt::latest_complete(dir.path()).found.has_value());
  save(dir.path(), 1);
  CHECK(ckpt::list_directory(dir.path()) ==
        std::vector<std::string>{".tmp-other", "latest", "notes.txt", "step-00000001"});
}

TEST_CASE("checkpoint: the same step saved twice is replaced") {
  TemporaryDirectory dir;
  save(dir.path(), 5, 0);
  save(dir.path(), 5, 1);
  const auto latest = ckpt::latest_complete(dir.path());
  CHECK(content(*latest.found) == std::pair<Index, float>{5, 1.0f});
  CHECK(ckpt::list_directory(dir.path()) == std::vector<std::string>{"latest", "step-00000005"});
}

TEST_CASE("checkpoint: retain keeps the newest complete ones") {
  TemporaryDirectory dir;
  for (const Index step : {1, 2, 3, 4, 5}) save(dir.path(), step);
  fs::remove(dir / "step-00000004/rank1.bin");
  CHECK(throws_code(ErrorCode::usage, [&] { ckpt::retain(dir.path(), 0); }));
  CHECK(ckpt::retain(dir.path(), 9).empty());
  CHECK(ckpt::retain(dir.path(), 2) ==
        std::vector<std::string>{dir / "step-00000002", dir / "step-00000001"});
  // The damaged one does not count and stays.
  CHECK(ckpt::list_directory(dir.path()) ==
        std::vector<std::string>{"latest", "step-00000003", "step-00000004", "step-00000005"});
  CHECK(ckpt::retain(dir / "absent", 1).empty());
}

TEST_CASE("checkpoint: retain interrupted at any operation keeps the newest") {
  for (std::uint64_t at = 0; at < 40; ++at) {
    CAPTURE(at);
    TemporaryDirectory dir;
    for (const Index step : {1, 2, 3}) save(dir.path(), step);
    const auto child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      arm(Fault::exit, at);
      ckpt::retain(dir.path(), 1);
      ::_exit(0);
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    const auto latest = ckpt::latest_complete(dir.path());
    CHECK(content(*latest.found).first == 3);
    CHECK(latest.skipped.empty());  // no half-removed directory looks like a checkpoint
    if (WEXITSTATUS(status) == 0) {
      CHECK(at > 8);
      break;
    }
    CHECK(at < 39);
  }
}

TEST_CASE("checkpoint: everything is flushed before it is renamed, the manifest last") {
  static std::vector<std::pair<FileOperation, std::string>> log;
  TemporaryDirectory dir;
  const std::string root = dir / "run";
  save(root, 1);
  log.clear();
  ckpt::FileFaults::install([](FileOperation operation, const char* path, std::uint64_t) {
    log.emplace_back(operation, path);
    return 0;
  });
  save(root, 2);
  ckpt::FileFaults::install(nullptr);
  const auto position = [&](FileOperation operation, const std::string& path_end,
                            std::size_t from) {
    for (std::size_t i = from; i < log.size(); ++i) {
      if (log[i].first == operation && log[i].second.ends_with(path_end)) return i;
    }
    FAIL("no such operation on ", path_end);
    return log.size();
  };
  const auto renamed = position(FileOperation::rename, "/step-00000002", 0);
  const auto manifest = position(FileOperation::create, "/manifest.json", 0);
  for (const auto* name : {"/rank0.safetensors", "/rank1.bin"}) {
    const auto created = position(FileOperation::create, name, 0);
    const auto written = position(FileOperation::write, name, created);
    const auto flushed = position(FileOperation::flush, name, written);
    CHECK(flushed < manifest);
    for (auto i = flushed; i < log.size(); ++i) {
      CHECK_FALSE((log[i].first == FileOperation::write && log[i].second.ends_with(name)));
    }
  }
  const auto manifest_flushed = position(FileOperation::flush, "/manifest.json", manifest);
  const auto temporary = fs::path(log[manifest].second).parent_path().string();
  const auto directory_flushed = position(FileOperation::flush, temporary, manifest_flushed);
  CHECK(directory_flushed < renamed);
  CHECK(log[renamed + 1] == std::pair{FileOperation::flush, root});
  const auto tracker = position(FileOperation::rename, "/latest", 0);
  CHECK(tracker > renamed + 1);
  CHECK(log[tracker - 1].first == FileOperation::flush);
  CHECK(log[tracker + 1] == std::pair{FileOperation::flush, root});
}

TEST_CASE("checkpoint: a full disk at any operation of a save") {
  survive_every_operation(Fault::no_space, one_before, 1, 2);
}
TEST_CASE("checkpoint: an exception at any operation of a save") {
  survive_every_operation(Fault::exception, one_before, 1, 2);
}
TEST_CASE("checkpoint: the process dies at any operation of a save") {
  survive_every_operation(Fault::exit, one_before, 1, 2);
}
TEST_CASE("checkpoint: a fault at any operation while a step is saved again") {
  survive_every_operation(Fault::no_space, one_before, 1, 1);
  survive_every_operation(Fault::exception, one_before, 1, 1);
  survive_every_operation(Fault::exit, one_before, 1, 1);
}

TEST_CASE(
    "checkpoint: the first save of a run interrupted at any operation leaves none or a whole") {
  const auto nothing = [](const std::string&) {};
  const auto total = count_operations(nothing, 1);
  for (std::uint64_t at = 0; at < total; ++at) {
    CAPTURE(at);
    TemporaryDirectory dir;
    arm(Fault::no_space, at);
    bool failed = false;
    try {
      save(dir / "run", 1);
    } catch (const mega::Error& error) {
      failed = !contains(error.what(), "is complete");
    }
    disarm();
    const auto latest = ckpt::latest_complete(dir / "run");
    CHECK(latest.skipped.empty());
    // A flush that fails after the rename leaves a checkpoint that is there, but was not promised.
    if (!failed) REQUIRE(latest.found.has_value());
    if (latest.found) CHECK(content(*latest.found).first == 1);
  }
}

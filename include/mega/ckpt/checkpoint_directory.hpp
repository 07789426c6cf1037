/// @file  Crash-safe checkpoints: a directory of files that exists completely or not at all.
/// opt-in: needs nlohmann-json and xxhash (link xxhash). Independent of what the files hold.
///
/// In `root`:  step-00000042/             one checkpoint: its files and manifest.json
///             step-00000042.replaced-X/  the former one of that step, while it is being replaced
///             .tmp-step-42-X/            one being written; ignored, removed by the next save
///             latest                     name of the last one committed, for people and scripts
///
/// A save flushes all files, writes the manifest last, flushes the directory and renames it. So a
/// name without ".tmp-" is complete unless the disk lost something, and the manifest's sizes and
/// checksums tell. One save at a time per root, which DirectoryLock sees to between processes; any
/// number of writers within a save.
#pragma once
#include <mega/ckpt/durable_file.hpp>
#include <mega/ckpt/strict_json.hpp>
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>

#include <nlohmann/json.hpp>
#include <sys/stat.h>
#include <xxhash.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mega::inline v0::ckpt {

/// One file of a checkpoint, as its writer measured it.
struct FileRecord {
  std::string name;  ///< plain: no directory part, no leading dot
  Index bytes = 0;
  std::uint64_t xxh3 = 0;  ///< XXH3-64 of the content
  friend bool operator==(const FileRecord&, const FileRecord&) = default;
};

/// What manifest.json says.
struct Manifest {
  Index step = 0;
  Index serial = 0;  ///< counts the saves in a root; the newest checkpoint has the greatest
  std::vector<FileRecord> files;
  nlohmann::json user;  ///< the object given to commit()
};

/// A checkpoint whose manifest was accepted.
struct Checkpoint {
  std::string path;
  Manifest manifest;
  [[nodiscard]] std::string file(std::string_view name) const {
    return path + "/" + std::string(name);
  }
};

namespace detail {

inline constexpr std::string_view manifest_name = "manifest.json";
inline constexpr std::string_view manifest_format = "mega checkpoint";
inline constexpr Index manifest_version = 1;
inline constexpr Index manifest_limit = Index{16} << 20;  // bytes; about 150 000 files
inline constexpr std::string_view temporary_prefix = ".tmp-";
inline constexpr std::string_view replaced_infix = ".replaced-";

/// XXH3-64 of a stream.
class Checksum {
 public:
  Checksum() : state_(XXH3_createState()) {
    expects(state_ != nullptr, ErrorCode::not_durable, "no memory for a checksum");
    XXH3_64bits_reset(state_.get());
  }
  void add(std::span<const std::byte> bytes) noexcept {
    XXH3_64bits_update(state_.get(), bytes.data(), bytes.size());
  }
  [[nodiscard]] std::uint64_t value() const noexcept { return XXH3_64bits_digest(state_.get()); }

 private:
  struct Free {
    void operator()(XXH3_state_t* state) const noexcept { XXH3_freeState(state); }
  };
  std::unique_ptr<XXH3_state_t, Free> state_;
};

inline std::string hex(std::uint64_t value) {
  std::string out(16, '0');
  for (auto digit = out.rbegin(); digit != out.rend(); ++digit, value >>= 4) {
    *digit = "0123456789abcdef"[value & 15];
  }
  return out;
}
inline std::optional<std::uint64_t> from_hex(std::string_view text) noexcept {
  if (text.size() != 16) return std::nullopt;
  std::uint64_t value = 0;
  for (const char c : text) {
    const auto digit = std::string_view("0123456789abcdef").find(c);
    if (digit == std::string_view::npos) return std::nullopt;
    value = (value << 4) | digit;
  }
  return value;
}

/// A name that cannot leave its directory, hide, or clash with the manifest.
inline bool is_plain_file_name(std::string_view name) noexcept {
  return !name.empty() && name.size() <= 200 && name.front() != '.' && name != manifest_name &&
         std::all_of(name.begin(), name.end(),
                     [](char c) { return c > ' ' && c < 0x7f && c != '/' && c != '\\'; });
}
inline void expect_plain_file_name(std::string_view name, ErrorCode code, std::string_view where) {
  expects(is_plain_file_name(name), code, [&] {
    return sentence(where, ": file name ", printable(name),
                    " is not plain: 1 to 200 printable ASCII characters without space or slash, "
                    "not beginning with a dot, not ",
                    manifest_name);
  });
}

inline std::string step_name(Index step) {
  const auto digits = std::to_string(step);
  return "step-" + std::string(digits.size() < 8 ? 8 - digits.size() : 0, '0') + digits;
}
/// The step of "step-00000042" or "step-00000042.replaced-X"; nothing for other names.
inline std::optional<Index> step_of(std::string_view name) {
  const auto plain = name.substr(0, name.find(replaced_infix));
  if (!plain.starts_with("step-") || plain.size() > 5 + 18) return std::nullopt;
  Index step = 0;
  for (const char c : plain.substr(5)) {
    if (c < '0' || c > '9') return std::nullopt;
    step = step * 10 + (c - '0');
  }
  return plain == step_name(step) ? std::optional(step) : std::nullopt;
}

inline bool exists(const std::string& path) noexcept {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0;
}

inline std::string manifest_text(const Manifest& manifest) {
  nlohmann::json out;
  out["format"] = manifest_format;
  out["version"] = manifest_version;
  out["step"] = manifest.step;
  out["serial"] = manifest.serial;
  out["user"] = manifest.user;
  auto& files = out["files"] = nlohmann::json::array();
  for (const auto& file : manifest.files) {
    files.push_back({{"name", file.name}, {"bytes", file.bytes}, {"xxh3", hex(file.xxh3)}});
  }
  std::string body;
  try {
    body = out.dump();
  } catch (const nlohmann::json::exception&) {
    throw Error(ErrorCode::usage, "the checkpoint's user metadata holds text that is not UTF-8");
  }
  // What cannot be read back must not be written: NaN becomes null, and nesting is capped.
  expects(parse_json_strictly(body, "the checkpoint's user metadata") == out, ErrorCode::usage,
          "the checkpoint's user metadata holds a number that JSON cannot carry (NaN or infinity)");
  out["manifest_xxh3"] = hex(XXH3_64bits(body.data(), body.size()));
  std::string text = out.dump(1) + "\n";
  expects(static_cast<Index>(text.size()) <= manifest_limit, ErrorCode::usage, [&] {
    return sentence("the checkpoint's manifest has ", text.size(), " bytes, more than ",
                    manifest_limit);
  });
  return text;
}

}  // namespace detail

/// Reads and checks a checkpoint's manifest; the files it names are not looked at.
/// @throws Error bad_input
[[nodiscard]] inline Manifest read_manifest(const std::string& directory) {
  const std::string path = directory + "/" + std::string(detail::manifest_name);
  auto json = parse_json_strictly(read_file(path, detail::manifest_limit, Links::refuse), path);
  const auto refuse = [&](const std::string& reason) {
    throw Error(ErrorCode::bad_input, sentence(path, ": ", reason));
  };
  const auto member = [&](const nlohmann::json& object, const char* key) -> const nlohmann::json& {
    if (!object.is_object() || !object.contains(key))
      refuse(sentence("key '", key, "' is missing"));
    return object.at(key);
  };
  const auto text = [&](const nlohmann::json& object, const char* key) {
    const auto& value = member(object, key);
    if (!value.is_string()) refuse(sentence("'", key, "' is not a string"));
    return value.get<std::string>();
  };
  const auto number = [&](const nlohmann::json& object, const char* key) {
    const auto& value = member(object, key);
    // Positive integers that fit Index; nlohmann keeps larger ones unsigned or as floating point.
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() >> 63 != 0) {
      refuse(sentence("'", key, "' is not an integer from 0 to 2^63 - 1"));
    }
    return value.get<Index>();
  };
  const auto checksum = [&](const nlohmann::json& object, const char* key) {
    const auto value = detail::from_hex(text(object, key));
    if (!value) refuse(sentence("'", key, "' is not 16 lower-case hexadecimal digits"));
    return *value;
  };

  if (text(json, "format") != detail::manifest_format) refuse("it is not a mega checkpoint");
  if (const Index version = number(json, "version"); version != detail::manifest_version) {
    refuse(sentence("format version ", version, " is unknown, this program reads ",
                    detail::manifest_version));
  }
  const auto declared = checksum(json, "manifest_xxh3");
  json.erase("manifest_xxh3");
  const std::string body = json.dump();  // every string was validated as UTF-8 by the parser
  if (XXH3_64bits(body.data(), body.size()) != declared) refuse("its own checksum does not match");

  Manifest manifest;
  manifest.step = number(json, "step");
  manifest.serial = number(json, "serial");
  manifest.user = member(json, "user");
  if (!manifest.user.is_object()) refuse("'user' is not an object");
  const auto& files = member(json, "files");
  if (!files.is_array()) refuse("'files' is not an array");
  std::set<std::string> names;
  for (const auto& file : files) {
    FileRecord record{text(file, "name"), number(file, "bytes"), checksum(file, "xxh3")};
    detail::expect_plain_file_name(record.name, ErrorCode::bad_input, path);
    if (!names.insert(record.name).second) {
      refuse(sentence("file ", printable(record.name), " is listed twice"));
    }
    manifest.files.push_back(std::move(record));
  }
  return manifest;
}

/// How far a checkpoint's files are checked: that they are there with the right size, or also that
/// no bit changed, which reads them all.
enum class Verify : std::uint8_t { sizes, checksums };

/// Checks every file that the manifest names.
/// @throws Error bad_input with the first file that differs, and how
inline void verify_files(const std::string& directory, const Manifest& manifest, Verify verify) {
  std::vector<std::byte> piece;
  for (const auto& record : manifest.files) {
    const InputFile file(directory + "/" + record.name, Links::refuse);
    expects(file.size() == record.bytes, ErrorCode::bad_input, [&] {
      return sentence("file ", file.path(), " has ", file.size(), " bytes but its manifest says ",
                      record.bytes);
    });
    if (verify == Verify::sizes) continue;
    piece.resize(std::size_t{1} << 20);
    detail::Checksum checksum;
    for (Index at = 0; at < record.bytes;) {
      const auto count = std::min(static_cast<Index>(piece.size()), record.bytes - at);
      const auto now = std::span(piece).first(static_cast<std::size_t>(count));
      file.read(at, now);
      checksum.add(now);
      at += count;
    }
    expects(checksum.value() == record.xxh3, ErrorCode::bad_input, [&] {
      return sentence("file ", file.path(), " has checksum ", detail::hex(checksum.value()),
                      " but its manifest says ", detail::hex(record.xxh3));
    });
  }
}

/// A checkpoint that was passed over, and why.
struct SkippedCheckpoint {
  std::string path;
  std::string reason;
};

namespace detail {

/// Directories of a root that look like checkpoints: readable ones, newest first, and the others.
struct Inventory {
  std::vector<Checkpoint> readable;
  std::vector<SkippedCheckpoint> skipped;
};

inline Inventory take_inventory(const std::string& root) {
  Inventory out;
  if (!exists(root)) return out;
  for (const auto& name : list_directory(root)) {
    const auto step = step_of(name);
    if (!step) continue;
    const std::string path = root + "/" + name;
    try {
      auto manifest = read_manifest(path);
      expects(manifest.step == *step, ErrorCode::bad_input,
              [&] { return sentence(path, " holds the manifest of step ", manifest.step); });
      out.readable.push_back({path, std::move(manifest)});
    } catch (const Error& fault) {
      out.skipped.push_back({path, fault.what()});
    }
  }
  std::sort(out.readable.begin(), out.readable.end(), [](const auto& a, const auto& b) {
    return a.manifest.serial != b.manifest.serial ? a.manifest.serial > b.manifest.serial
                                                  : a.path < b.path;
  });
  return out;
}

/// Removes a checkpoint. Renamed first, so that a crash half-way leaves no directory that looks
/// like one; what is left then goes with the next save's cleaning.
inline void discard(const std::string& root, const std::string& path, Index step) {
  const std::string doomed =
      root + "/" + std::string(temporary_prefix) + step_name(step) + "-" + random_suffix();
  rename_durably(path, doomed);
  remove_flat_directory(doomed);
}

/// Nothing if the files are complete, else the reason.
inline std::optional<std::string> fault_of(const Checkpoint& checkpoint, Verify verify) {
  try {
    verify_files(checkpoint.path, checkpoint.manifest, verify);
    return std::nullopt;
  } catch (const Error& fault) {
    return fault.what();
  }
}

}  // namespace detail

struct LatestCheckpoint {
  std::optional<Checkpoint> found;
  std::vector<SkippedCheckpoint> skipped;  ///< newer than `found`, or without a readable manifest
};

/// The checkpoint committed last whose files verify. Incomplete ones are passed over and reported.
/// A missing root, or one without checkpoints, is not an error: `found` is then empty.
/// With several ranks, call it on one and send the path to the others.
/// @throws Error bad_input if the root exists but cannot be listed
[[nodiscard]] inline LatestCheckpoint latest_complete(const std::string& root,
                                                      Verify verify = Verify::checksums) {
  auto inventory = detail::take_inventory(root);
  LatestCheckpoint out{std::nullopt, std::move(inventory.skipped)};
  for (auto& checkpoint : inventory.readable) {
    if (auto reason = detail::fault_of(checkpoint, verify)) {
      out.skipped.push_back({checkpoint.path, std::move(*reason)});
    } else {
      out.found = std::move(checkpoint);
      break;
    }
  }
  return out;
}

/// Removes checkpoints until the `keep` newest complete ones are left. Nothing is removed unless
/// the newest complete one passes `verify`; incomplete ones are left for a person to look at.
/// @pre    no save is running in `root`
/// @return paths that are gone
/// @throws Error usage if keep < 1, not_durable if a removal could not be started
inline std::vector<std::string> retain(const std::string& root, int keep,
                                       Verify verify = Verify::checksums) {
  expects(keep >= 1, ErrorCode::usage, [&] {
    return sentence("cannot retain ", keep, " checkpoints; at least 1 is always kept");
  });
  std::vector<std::string> removed;
  int kept = 0;
  for (const auto& checkpoint : detail::take_inventory(root).readable) {
    if (kept < keep) {
      if (!detail::fault_of(checkpoint, kept == 0 ? verify : Verify::sizes)) ++kept;
      continue;
    }
    detail::discard(root, checkpoint.path, checkpoint.manifest.step);
    removed.push_back(checkpoint.path);
  }
  return removed;
}

/// A file of a checkpoint being written; it is measured on the way.
class ShardFile {
 public:
  ShardFile(const std::string& directory, std::string_view name)
      : name_(name), file_(directory + "/" + name_) {}

  void write(std::span<const std::byte> bytes) {
    file_.write(bytes);
    checksum_.add(bytes);
  }
  /// Flushes and closes. @return what the coordinator needs for commit()
  FileRecord finish() {
    file_.finish();
    return {name_, file_.bytes(), checksum_.value()};
  }

 private:
  std::string name_;
  DurableFile file_;
  detail::Checksum checksum_;
};

/// One save. The coordinator constructs it and tells directory() to the other ranks, which join();
/// every rank writes its files, the coordinator collects their records and commits.
/// An uncommitted save disappears with its coordinator.
class CheckpointWriter {
 public:
  /// Coordinator. Makes the root if it is missing, and the save's temporary directory in it.
  /// @throws Error not_durable; usage for a negative step or one of 18 digits and more
  CheckpointWriter(std::string root, Index step)
      : CheckpointWriter(std::move(root), step, Role::coordinator) {
    expects(step >= 0 && step < 100'000'000'000'000'000, ErrorCode::usage,
            [&] { return sentence("checkpoint step ", step, " is not within 0 to 10^17 - 1"); });
    make_directories(root_);
    const auto path = root_ + "/" + std::string(detail::temporary_prefix) + "step-" +
                      std::to_string(step) + "-" + detail::random_suffix();
    make_directory(path);
    directory_ = path;
  }

  /// Another rank of the same save; `directory` is the coordinator's directory().
  [[nodiscard]] static CheckpointWriter join(std::string directory) {
    CheckpointWriter out(std::string(), 0, Role::member);
    out.directory_ = std::move(directory);
    return out;
  }

  CheckpointWriter(CheckpointWriter&& other) noexcept
      : root_(std::move(other.root_)),
        directory_(std::exchange(other.directory_, {})),
        step_(other.step_),
        role_(other.role_) {}
  CheckpointWriter& operator=(CheckpointWriter&&) = delete;
  ~CheckpointWriter() {
    if (role_ == Role::coordinator && !directory_.empty()) remove_flat_directory(directory_);
  }

  /// The temporary directory that the files are written to.
  [[nodiscard]] const std::string& directory() const noexcept { return directory_; }

  /// A new file of the checkpoint; no two ranks may use one name.
  /// @throws Error logic for a name that is not plain; not_durable, also if the name is taken
  [[nodiscard]] ShardFile add_file(std::string_view name) const {
    detail::expect_plain_file_name(name, ErrorCode::logic, directory_);
    return ShardFile(directory_, name);
  }

  /// Coordinator, once, after all ranks have finished their files: makes the checkpoint visible.
  /// @param files  records of all ranks' files
  /// @param user   a JSON object that is handed back by read_manifest()
  /// @return the checkpoint's directory
  /// @throws Error not_durable: unless the sentence says that the checkpoint is complete, the one
  ///         before is still the latest; logic, usage for records or metadata that cannot be
  ///         written
  std::string commit(std::vector<FileRecord> files,
                     nlohmann::json user = nlohmann::json::object()) {
    expects(role_ == Role::coordinator && !directory_.empty(), ErrorCode::logic,
            "only the rank that made a checkpoint can commit it, and only once");
    check_records(files);
    expects(user.is_object(), ErrorCode::usage, "a checkpoint's user metadata must be an object");
    const auto earlier = detail::take_inventory(root_).readable;
    const Index serial = earlier.empty() ? 1 : earlier.front().manifest.serial + 1;
    write_text(directory_ + "/" + std::string(detail::manifest_name),
               detail::manifest_text({step_, serial, std::move(files), std::move(user)}));
    fsync_directory(directory_);

    const std::string name = detail::step_name(step_);
    const std::string path = root_ + "/" + name;
    // A directory cannot be renamed over another one that has files, so a former save of this step
    // steps aside first; under its second name it is still found.
    if (detail::exists(path)) {
      rename_durably(path, path + std::string(detail::replaced_infix) + detail::random_suffix());
    }
    rename_durably(directory_, path);
    directory_.clear();

    update_tracker(name, path);
    remove_leftovers();
    return path;
  }

 private:
  enum class Role : std::uint8_t { coordinator, member };

  CheckpointWriter(std::string root, Index step, Role role)
      : root_(std::move(root)), step_(step), role_(role) {}

  void check_records(const std::vector<FileRecord>& files) const {
    std::set<std::string_view> names;
    for (const auto& record : files) {
      detail::expect_plain_file_name(record.name, ErrorCode::logic, directory_);
      expects(names.insert(record.name).second, ErrorCode::logic, [&] {
        return sentence(directory_, ": file ", printable(record.name), " is recorded twice");
      });
    }
    try {
      verify_files(directory_, {step_, 0, files, {}}, Verify::sizes);
    } catch (const Error& fault) {
      throw Error(
          ErrorCode::not_durable,
          detail::exists(directory_)
              ? sentence("checkpoint not committed: ", fault.what())
              : sentence("the checkpoint of step ", step_, " is not saved: its folder ", directory_,
                         " was removed while it was written, as by another run "
                         "that saves in ",
                         root_, "; give each run a folder of its own"));
    }
  }

  static void write_text(const std::string& path, std::string_view text) {
    DurableFile file(path);
    file.write(std::as_bytes(std::span(text)));
    file.finish();
  }

  void update_tracker(const std::string& name, const std::string& path) const {
    const std::string temporary =
        root_ + "/" + std::string(detail::temporary_prefix) + "latest-" + detail::random_suffix();
    try {
      write_text(temporary, name + "\n");
      rename_durably(temporary, root_ + "/latest");
    } catch (const Error& fault) {
      remove_file(temporary);
      throw Error(ErrorCode::not_durable,
                  sentence("checkpoint ", path,
                           " is complete, but file 'latest' was not updated: ", fault.what()));
    }
  }

  /// Removes what interrupted saves left, and former saves whose replacement is complete. The new
  /// checkpoint is safe by now, so what cannot be removed is left to the next save.
  void remove_leftovers() const noexcept {
    try {
      for (const auto& name : list_directory(root_)) {
        const std::string path = root_ + "/" + name;
        if (name.starts_with(".tmp-step-")) {
          remove_flat_directory(path);
        } else if (name.starts_with(".tmp-latest-")) {
          remove_file(path);
        } else if (const auto step = detail::step_of(name);
                   step && name.find(detail::replaced_infix) != name.npos &&
                   is_complete(root_ + "/" + detail::step_name(*step))) {
          detail::discard(root_, path, *step);
        }
      }
    } catch (...) {
    }
  }
  static bool is_complete(const std::string& path) {
    try {
      verify_files(path, read_manifest(path), Verify::sizes);
      return true;
    } catch (const Error&) {
      return false;
    }
  }

  std::string root_;
  std::string directory_;
  Index step_;
  Role role_;
};

static_assert(requires(ShardFile & file, std::span<const std::byte> bytes) {
  file.write(bytes);
  { file.finish() } -> std::same_as<FileRecord>;
});

}  // namespace mega::inline v0::ckpt

/// @file  PlainDocument: the numbers, texts, lists and dictionaries of a small file.
///
/// Nodes are numbers into one table, so that a value which a file shares is stored once, depth
/// costs no stack, and a hostile file can ask for no more memory than the limit of nodes.
#pragma once
#include <mega/core/error.hpp>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

namespace mega::inline v0::scan {

class PlainDocument {
 public:
  enum class Kind : std::uint8_t { null, boolean, integer, real, text, list, dictionary };
  using Node = std::uint32_t;
  static constexpr Node absent = ~Node{0};
  static constexpr std::size_t most_nodes = std::size_t{1} << 22U;  ///< and as many list members

  explicit PlainDocument(std::string source) : source_(std::move(source)) {}

  /// @throws Error(bad_input) from all add functions and append(): more than most_nodes
  Node add_null() { return add({}); }
  Node add_boolean(bool value) { return add({Kind::boolean, value ? 1 : 0, 0, {}}); }
  Node add_integer(std::int64_t value) { return add({Kind::integer, value, 0, {}}); }
  Node add_real(double value) { return add({Kind::real, 0, value, {}}); }
  /// @pre the bytes outlive the document
  Node add_text(std::string_view text) { return add({Kind::text, 0, 0, text}); }
  Node add_own_text(std::string text) {
    owned_.push_back(std::move(text));
    return add_text(owned_.back());
  }
  Node add_list() { return add_container(Kind::list); }
  Node add_dictionary() { return add_container(Kind::dictionary); }
  /// Of a dictionary, keys and values are appended in turn. @pre kind(container) is one of the two
  void append(Node container, Node child) {
    expects(++members_ <= most_nodes, ErrorCode::bad_input, [&] { return too_large(); });
    children_[static_cast<std::size_t>(nodes_[container].integer)].push_back(child);
  }

  [[nodiscard]] Node root() const noexcept { return root_; }
  void set_root(Node root) noexcept { root_ = root; }
  [[nodiscard]] const std::string& source() const noexcept { return source_; }

  /// Every reading function takes absent for a node without any of the properties asked for.
  [[nodiscard]] Kind kind(Node node) const noexcept {
    return node == absent ? Kind::null : nodes_[node].kind;
  }
  [[nodiscard]] bool is_container(Node node) const noexcept {
    return kind(node) == Kind::list || kind(node) == Kind::dictionary;
  }
  [[nodiscard]] bool is_integer(Node node) const noexcept { return kind(node) == Kind::integer; }
  [[nodiscard]] std::int64_t integer(Node node, std::int64_t otherwise = -1) const noexcept {
    return is_integer(node) ? nodes_[node].integer : otherwise;
  }
  [[nodiscard]] bool truth(Node node) const noexcept {
    return kind(node) == Kind::boolean && nodes_[node].integer != 0;
  }
  [[nodiscard]] double real(Node node, double otherwise = 0) const noexcept {
    return is_integer(node)           ? static_cast<double>(nodes_[node].integer)
           : kind(node) == Kind::real ? nodes_[node].real
                                      : otherwise;
  }
  [[nodiscard]] std::string_view text(Node node) const noexcept {
    return kind(node) == Kind::text ? nodes_[node].text : std::string_view{};
  }
  /// Members of a list; keys and values of a dictionary, each counted.
  [[nodiscard]] const std::vector<Node>& children(Node node) const noexcept {
    static const std::vector<Node> empty;
    return is_container(node) ? children_[static_cast<std::size_t>(nodes_[node].integer)] : empty;
  }
  [[nodiscard]] Node at(Node list, std::size_t i) const noexcept {
    return kind(list) == Kind::list && i < children(list).size() ? children(list)[i] : absent;
  }
  /// The value of a key; of a key that stands twice, the last one.
  [[nodiscard]] Node find(Node dictionary, std::string_view key) const noexcept {
    if (kind(dictionary) != Kind::dictionary) return absent;
    const std::vector<Node>& pairs = children(dictionary);
    for (std::size_t i = pairs.size() / 2; i-- > 0;) {
      if (text(pairs[2 * i]) == key) return pairs[2 * i + 1];
    }
    return absent;
  }

 private:
  struct Entry {
    Kind kind = Kind::null;
    std::int64_t integer = 0;  // of a container: its place in children_
    double real = 0;
    std::string_view text;
  };

  [[nodiscard]] std::string too_large() const {
    return sentence(source_, " holds more than ", most_nodes, " values, the most that is read");
  }
  Node add(const Entry& entry) {
    expects(nodes_.size() < most_nodes, ErrorCode::bad_input, [&] { return too_large(); });
    nodes_.push_back(entry);
    return static_cast<Node>(nodes_.size() - 1);
  }
  Node add_container(Kind kind) {
    children_.emplace_back();
    return add({kind, static_cast<std::int64_t>(children_.size() - 1), 0, {}});
  }

  std::string source_;
  std::vector<Entry> nodes_;
  std::vector<std::vector<Node>> children_;
  std::deque<std::string> owned_;
  std::size_t members_ = 0;
  Node root_ = absent;
};

}  // namespace mega::inline v0::scan

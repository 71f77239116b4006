// Byte-level BPE from a Hugging Face tokenizer.json (Qwen type). Exact to the reference: added
// tokens split off first, NFC, the Split pattern (PCRE2), bytes to symbols, merges by rank.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace orrery {

class Tokenizer {
 public:
  using Named = std::pair<std::string, std::string>;

  // `folder` holds tokenizer.json and, optionally, tokenizer_config.json and chat_template.jinja.
  static Tokenizer load(const std::filesystem::path& folder);
  // What the file asks for and this does not do is refused by name, with ErrorKind::unsupported.
  static Tokenizer from_json(std::string_view tokenizer_json, const std::string& origin);
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  // Const and thread-safe. Invalid UTF-8 is replaced by U+FFFD, one per maximal invalid part.
  // Nothing is added in front or behind, nothing is cut off.
  std::vector<int64_t> encode(std::string_view text) const;
  // Bytes that are not UTF-8 once joined are replaced in the same way; an unknown id is refused.
  std::string decode(std::span<const int64_t> ids) const;

  int64_t vocab_size() const;  // largest id + 1
  // Of an added token's text or of a vocabulary entry as the file spells it.
  std::optional<int64_t> id_of(std::string_view token) const;
  std::optional<int64_t> eos_id() const;     // eos_token of tokenizer_config.json
  const std::string& chat_template() const;  // empty when the folder has none
  // The tokens tokenizer_config.json names (eos_token, pad_token and so on): name, text.
  const std::vector<Named>& special_tokens() const;
  const std::string& origin() const;  // the folder or file, for messages

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace orrery

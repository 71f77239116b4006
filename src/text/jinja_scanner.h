// The source of a chat template, and the tokens within its tags.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace orrery::jinja {

// Refuses at a place of a source: "origin, line 3: <text>: reason".
class Source {
 public:
  // Line ends become \n and one at the end is dropped, as Jinja does.
  Source(std::string_view text, std::string origin);
  std::string_view text() const { return text_; }
  [[noreturn]] void refuse(size_t begin, size_t end, const std::string& reason) const;

 private:
  std::string text_;
  std::string origin_;
};

struct Token {
  enum class Kind { name, text, integer, symbol, end };
  Kind kind = Kind::end;
  std::string text;
  size_t begin = 0;
  size_t end = 0;
};

// Tokens of one tag, from behind its opening to its end, which is given without the minus sign.
class Scanner {
 public:
  Scanner(const Source& source, size_t at, std::string_view close);

  const Token& peek() const { return token_; }
  Token take();  // at the end, that token again
  bool is_symbol(std::string_view text) const {
    return token_.kind == Token::Kind::symbol && token_.text == text;
  }
  bool is_name(std::string_view text) const {
    return token_.kind == Token::Kind::name && token_.text == text;
  }
  bool take_symbol(std::string_view text) { return is_symbol(text) && (take(), true); }
  bool take_name(std::string_view text) { return is_name(text) && (take(), true); }
  bool at_end() const { return token_.kind == Token::Kind::end; }
  size_t last_end() const { return last_end_; }
  size_t behind() const { return at_; }  // once at_end(): behind the closing
  bool trims() const { return trims_; }
  bool keeps() const { return keeps_; }

 private:
  void advance();
  bool closes(std::string_view text);
  void symbol(std::string_view text);

  const Source& source_;
  size_t at_;
  std::string_view close_;
  Token token_;
  int depth_ = 0;  // of open brackets: within them }} closes dicts, not the tag
  size_t last_end_ = 0;
  bool trims_ = false;
  bool keeps_ = false;
};

}  // namespace orrery::jinja

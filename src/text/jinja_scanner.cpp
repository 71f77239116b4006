#include "text/jinja_scanner.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>

#include "base/error.h"
#include "text/utf8.h"

namespace orrery::jinja {

namespace {

constexpr size_t kMaxSourceBytes = 1024 * 1024;

bool is_name_start(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The escapes of a Python string literal; an unknown one keeps its backslash.
class StringLiteral {
 public:
  StringLiteral(const Source& source, size_t begin, size_t end)
      : source_(source),
        body_(source.text().substr(begin + 1, end - begin - 2)),
        begin_(begin),
        end_(end) {}

  std::string value() {
    while (at_ < body_.size()) {
      if (body_[at_] == '\\' && at_ + 1 < body_.size())
        escape();
      else
        out_ += body_[at_++];
    }
    return std::move(out_);
  }

 private:
  void escape() {
    static constexpr std::string_view kLetters = "abfnrtv\\'\"";
    static constexpr std::string_view kValues = "\a\b\f\n\r\t\v\\'\"";
    const char c = body_[at_ + 1];
    at_ += 2;
    if (const size_t known = kLetters.find(c); known != std::string_view::npos)
      out_ += kValues[known];
    else if (c == '\n')
      return;
    else if (c == 'x')
      number(2, 16);
    else if (c == 'u')
      number(4, 16);
    else if (c == 'U')
      number(8, 16);
    else if (c >= '0' && c <= '7')
      octal();
    else if (c == 'N')
      source_.refuse(begin_, end_, "the escape \\N is not supported");
    else
      (out_ += '\\') += c;
  }
  void octal() {
    --at_;
    size_t digits = 0;
    while (digits < 3 && at_ + digits < body_.size() && body_[at_ + digits] >= '0' &&
           body_[at_ + digits] <= '7') {
      ++digits;
    }
    number(digits, 8);
  }
  void number(size_t digits, int base) {
    uint32_t code = 0;
    const char* first = body_.data() + at_;
    const bool fits = at_ + digits <= body_.size();
    const auto read =
        fits ? std::from_chars(first, first + digits, code, base) : std::from_chars_result{};
    if (!fits || read.ec != std::errc() || read.ptr != first + digits) {
      source_.refuse(begin_, end_, "a numeric escape needs more digits");
    }
    if (code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) {
      source_.refuse(begin_, end_, "an escape names no character");
    }
    append_utf8(out_, code);
    at_ += digits;
  }

  const Source& source_;
  std::string_view body_;
  size_t begin_, end_;
  size_t at_ = 0;
  std::string out_;
};

}  // namespace

Source::Source(std::string_view text, std::string origin) : origin_(std::move(origin)) {
  require(text.size() <= kMaxSourceBytes, ErrorKind::unsupported, origin_,
          ": the chat template has ", text.size(), " bytes, more than the ", kMaxSourceBytes,
          " allowed");
  const std::string valid = valid_utf8(text);
  for (size_t i = 0; i < valid.size(); ++i) {
    if (valid[i] != '\r')
      text_ += valid[i];
    else if (i + 1 == valid.size() || valid[i + 1] != '\n')
      text_ += '\n';
  }
  if (!text_.empty() && text_.back() == '\n') text_.pop_back();
}

void Source::refuse(size_t begin, size_t end, const std::string& reason) const {
  constexpr size_t kMaxQuote = 160;
  const auto line =
      std::count(text_.begin(), text_.begin() + static_cast<ptrdiff_t>(begin), '\n') + 1;
  std::string quote = text_.substr(begin, std::min(end - begin, kMaxQuote));
  if (end - begin > kMaxQuote) quote += "...";
  fail(ErrorKind::unsupported, origin_, ", line ", line, ": ", quote, quote.empty() ? "" : ": ",
       reason);
}

Scanner::Scanner(const Source& source, size_t at, std::string_view close)
    : source_(source), at_(at), close_(close) {
  advance();
}

Token Scanner::take() {
  if (at_end()) return token_;
  Token taken = std::move(token_);
  last_end_ = taken.end;
  advance();
  return taken;
}

void Scanner::advance() {
  const std::string_view text = source_.text();
  while (at_ < text.size() &&
         std::string_view(" \t\n\f\v").find(text[at_]) != std::string_view::npos)
    ++at_;
  const size_t begin = at_;
  if (at_ == text.size()) source_.refuse(begin, begin, concat("a tag is not closed with ", close_));
  if (depth_ == 0 && closes(text)) {
    token_ = {Token::Kind::end, {}, begin, begin};
    return;
  }
  const char c = text[at_];
  if (is_name_start(c)) {
    while (at_ < text.size() && (is_name_start(text[at_]) || is_digit(text[at_]))) ++at_;
    token_ = {Token::Kind::name, std::string(text.substr(begin, at_ - begin)), begin, at_};
  } else if (is_digit(c)) {
    while (at_ < text.size() &&
           (is_digit(text[at_]) || is_name_start(text[at_]) ||
            (text[at_] == '.' && at_ + 1 < text.size() && is_digit(text[at_ + 1])))) {
      ++at_;
    }
    token_ = {Token::Kind::integer, std::string(text.substr(begin, at_ - begin)), begin, at_};
  } else if (c == '"' || c == '\'') {
    for (++at_; at_ < text.size() && text[at_] != c; ++at_) {
      if (text[at_] == '\\') ++at_;
    }
    if (at_ >= text.size()) source_.refuse(begin, begin + 1, "a string is not closed");
    ++at_;
    token_ = {Token::Kind::text, StringLiteral(source_, begin, at_).value(), begin, at_};
  } else {
    symbol(text);
  }
}

bool Scanner::closes(std::string_view text) {
  const bool sign = text[at_] == '-' || text[at_] == '+';
  if (text.substr(at_ + (sign ? 1 : 0), close_.size()) != close_) return false;
  trims_ = text[at_] == '-';
  keeps_ = text[at_] == '+';
  at_ += close_.size() + (sign ? 1 : 0);
  return true;
}

void Scanner::symbol(std::string_view text) {
  static constexpr std::array<std::string_view, 6> kDouble = {"==", "!=", "<=", ">=", "//", "**"};
  static constexpr std::string_view kSingle = "+-*/%~|.,:()[]{}<>=";
  const size_t begin = at_;
  const std::string_view two = text.substr(at_, 2);
  if (std::find(kDouble.begin(), kDouble.end(), two) != kDouble.end()) {
    at_ += 2;
  } else if (kSingle.find(text[at_]) != std::string_view::npos) {
    if (text[at_] == '{' || text[at_] == '[' || text[at_] == '(') ++depth_;
    if ((text[at_] == '}' || text[at_] == ']' || text[at_] == ')') && depth_ > 0) --depth_;
    ++at_;
  } else {
    source_.refuse(begin, begin + 1, "an unexpected character");
  }
  token_ = {Token::Kind::symbol, std::string(text.substr(begin, at_ - begin)), begin, at_};
}

}  // namespace orrery::jinja

// The Split pattern of a tokenizer.json: a regular expression that cuts text into pieces.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace orrery {

// Matches become pieces, and so does the text between matches (behaviour "Isolated").
class SplitPattern {
 public:
  // `origin` names the pattern in errors. \s means Unicode White_Space, as in the reference's
  // engine. Refused: what does not compile, and what can match the empty string.
  SplitPattern(const std::string& pattern, const std::string& origin);
  SplitPattern(SplitPattern&&) noexcept;
  SplitPattern& operator=(SplitPattern&&) noexcept;
  ~SplitPattern();

  // One thread's walk over texts.
  class Matcher {
   public:
    explicit Matcher(const SplitPattern& pattern);
    ~Matcher();
    Matcher(const Matcher&) = delete;
    Matcher& operator=(const Matcher&) = delete;
    // Begins with `text`, which must be valid UTF-8 and outlive the last next().
    void start(std::string_view text);
    // The next piece, in order and without gaps; empty at the end.
    std::string_view next();

   private:
    struct State;
    std::unique_ptr<State> state_;
  };

 private:
  struct Compiled;
  std::unique_ptr<Compiled> compiled_;
};

}  // namespace orrery

#include "text/split_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>

#include "base/error.h"

namespace orrery {

namespace {

constexpr size_t kMaxPatternBytes = 64 * 1024;
constexpr size_t kFirstStackBytes = 32 * 1024;
constexpr size_t kMaxStackBytes = 1024 * 1024;

// With UCP, PCRE2's \s includes U+180E, which is not White_Space.
std::string with_unicode_space(std::string_view pattern) {
  std::string out;
  for (size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] != '\\' || i + 1 == pattern.size()) {
      out += pattern[i];
      continue;
    }
    const char escaped = pattern[++i];
    if (escaped == 's')
      out += "\\p{White_Space}";
    else if (escaped == 'S')
      out += "\\P{White_Space}";
    else
      (out += '\\') += escaped;
  }
  return out;
}

std::string message_of(int code) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(code, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

}  // namespace

struct SplitPattern::Compiled {
  pcre2_code* code = nullptr;
  std::string origin;
  ~Compiled() { pcre2_code_free(code); }
};

SplitPattern::SplitPattern(const std::string& pattern, const std::string& origin)
    : compiled_(std::make_unique<Compiled>()) {
  require(pattern.size() <= kMaxPatternBytes, ErrorKind::unsupported, origin, ": the pattern has ",
          pattern.size(), " bytes, more than the ", kMaxPatternBytes, " allowed");
  compiled_->origin = origin;
  const std::string text = with_unicode_space(pattern);
  int code = 0;
  PCRE2_SIZE offset = 0;
  compiled_->code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &code, &offset, nullptr);
  require(compiled_->code != nullptr, ErrorKind::unsupported, origin,
          ": cannot compile the pattern \"", pattern, "\": ", message_of(code));
  uint32_t matches_empty = 0;
  pcre2_pattern_info(compiled_->code, PCRE2_INFO_MATCHEMPTY, &matches_empty);
  require(matches_empty == 0, ErrorKind::unsupported, origin, ": the pattern \"", pattern,
          "\" can match the empty string, which cuts nothing");
  // Where the system forbids making code at run time the interpreter does the same, slower.
  pcre2_jit_compile(compiled_->code, PCRE2_JIT_COMPLETE);
}

SplitPattern::SplitPattern(SplitPattern&&) noexcept = default;
SplitPattern& SplitPattern::operator=(SplitPattern&&) noexcept = default;
SplitPattern::~SplitPattern() = default;

struct SplitPattern::Matcher::State {
  const Compiled& compiled;
  pcre2_match_data* match = nullptr;
  pcre2_match_context* context = nullptr;
  pcre2_jit_stack* stack = nullptr;
  std::string_view text;
  size_t position = 0;
  size_t match_begin = 0;  // of the last match, which may lie behind `position`
  size_t match_end = 0;

  explicit State(const Compiled& source) : compiled(source) {
    match = pcre2_match_data_create_from_pattern(source.code, nullptr);
    context = pcre2_match_context_create(nullptr);
    stack = pcre2_jit_stack_create(kFirstStackBytes, kMaxStackBytes, nullptr);
    require(match && context && stack, ErrorKind::out_of_memory, source.origin,
            ": no memory to match the pattern");
    pcre2_jit_stack_assign(context, nullptr, stack);
  }
  ~State() {
    pcre2_jit_stack_free(stack);
    pcre2_match_context_free(context);
    pcre2_match_data_free(match);
  }
};

SplitPattern::Matcher::Matcher(const SplitPattern& pattern)
    : state_(std::make_unique<State>(*pattern.compiled_)) {}
SplitPattern::Matcher::~Matcher() = default;

void SplitPattern::Matcher::start(std::string_view text) {
  state_->text = text;
  state_->position = state_->match_begin = state_->match_end = 0;
}

std::string_view SplitPattern::Matcher::next() {
  State& state = *state_;
  const size_t begin = state.position;
  if (begin == state.text.size()) return {};
  if (begin == state.match_end) {
    const int found =
        pcre2_match(state.compiled.code, reinterpret_cast<PCRE2_SPTR>(state.text.data()),
                    state.text.size(), begin, PCRE2_NO_UTF_CHECK, state.match, state.context);
    require(found >= 0 || found == PCRE2_ERROR_NOMATCH, ErrorKind::unsupported,
            state.compiled.origin, ": cannot match the pattern at byte ", begin,
            " of the text: ", message_of(found));
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(state.match);
    state.match_begin = found < 0 ? state.text.size() : range[0];
    state.match_end = found < 0 ? state.text.size() : range[1];
    require(found < 0 || (state.match_begin >= begin && state.match_end > state.match_begin),
            ErrorKind::unsupported, state.compiled.origin, ": the pattern matched no text at byte ",
            begin);
  }
  state.position = begin < state.match_begin ? state.match_begin : state.match_end;
  return state.text.substr(begin, state.position - begin);
}

}  // namespace orrery

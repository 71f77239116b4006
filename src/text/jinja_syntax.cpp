#include "text/jinja_syntax.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

#include "base/error.h"
#include "text/utf8.h"

namespace orrery::jinja {

namespace {

constexpr int kMaxDepth = 128;  // of expressions and of nested blocks: bounds the stack

using Kind = Expression::Kind;

// Precedence climbs one method a level, from the loosest: a if b, or, and, not, comparison, + -, ~,
// * // %, sign, then members, calls, filters and tests.
class ExpressionParser {
 public:
  ExpressionParser(const Source& source, Scanner& scanner) : source_(source), scanner_(scanner) {}

  ExpressionPtr expression() {
    const Nesting nesting(*this);
    ExpressionPtr value = disjunction();
    while (scanner_.take_name("if")) {
      ExpressionPtr condition = disjunction();
      ExpressionPtr otherwise = scanner_.take_name("else") ? expression() : nullptr;
      value =
          make(Kind::conditional, "", std::move(value), std::move(condition), std::move(otherwise));
    }
    return value;
  }

  // Without "a if b else c", as the tags if, elif and for take it.
  ExpressionPtr disjunction() {
    ExpressionPtr value = conjunction();
    while (scanner_.take_name("or"))
      value = make(Kind::either, "", std::move(value), conjunction());
    return value;
  }

 private:
  struct Nesting {
    explicit Nesting(ExpressionParser& p) : parser(p) {
      if (++parser.depth_ > kMaxDepth) {
        const Token& token = parser.scanner_.peek();
        parser.source_.refuse(token.begin, token.end,
                              concat("nested deeper than ", kMaxDepth, " levels"));
      }
    }
    ~Nesting() { --parser.depth_; }
    ExpressionParser& parser;
  };

  template <typename... Parts>
  ExpressionPtr make(Kind kind, std::string text, ExpressionPtr first, Parts... rest) {
    auto value = std::make_unique<Expression>();
    value->kind = kind;
    value->text = std::move(text);
    value->begin = first->begin;
    value->parts.push_back(std::move(first));
    (value->parts.push_back(std::move(rest)), ...);
    return finished(std::move(value));
  }

  ExpressionPtr finished(ExpressionPtr value) {
    value->end = scanner_.last_end();
    int deepest = 0;
    for (const ExpressionPtr& part : value->parts) {
      if (part) deepest = std::max(deepest, part->depth);
    }
    for (const auto& [name, part] : value->keywords) deepest = std::max(deepest, part->depth);
    value->depth = deepest + 1;
    if (value->depth > kMaxDepth) {
      source_.refuse(value->begin, value->end,
                     concat("an expression of more than ", kMaxDepth, " levels"));
    }
    return value;
  }

  ExpressionPtr conjunction() {
    ExpressionPtr value = negation();
    while (scanner_.take_name("and")) value = make(Kind::both, "", std::move(value), negation());
    return value;
  }

  ExpressionPtr negation() {
    const Nesting nesting(*this);
    const size_t begin = scanner_.peek().begin;
    if (!scanner_.take_name("not")) return comparison();
    ExpressionPtr value = make(Kind::negation, "", negation());
    value->begin = begin;
    return value;
  }

  std::optional<std::string> comparison_operator() {
    static constexpr std::array<std::string_view, 6> kSymbols = {"==", "!=", "<", ">", "<=", ">="};
    const Token& token = scanner_.peek();
    if (token.kind == Token::Kind::symbol &&
        std::find(kSymbols.begin(), kSymbols.end(), token.text) != kSymbols.end()) {
      return scanner_.take().text;
    }
    if (scanner_.take_name("in")) return "in";
    if (!scanner_.is_name("not")) return std::nullopt;
    const Token taken = scanner_.take();
    if (!scanner_.take_name("in")) source_.refuse(taken.begin, taken.end, "expected \"not in\"");
    return "not in";
  }

  ExpressionPtr comparison() {
    ExpressionPtr value = sum();
    if (std::optional<std::string> first = comparison_operator()) {
      value = make(Kind::binary, *first, std::move(value), sum());
      if (comparison_operator()) {
        source_.refuse(value->begin, scanner_.last_end(),
                       "a chain of comparisons is not supported");
      }
    }
    return value;
  }

  // Left-associative operators of one level, each operand from `next`.
  template <size_t N>
  ExpressionPtr chain(const std::array<std::string_view, N>& operators,
                      ExpressionPtr (ExpressionParser::*next)()) {
    ExpressionPtr value = (this->*next)();
    while (scanner_.peek().kind == Token::Kind::symbol &&
           std::find(operators.begin(), operators.end(), scanner_.peek().text) != operators.end()) {
      std::string text = scanner_.take().text;
      value = make(Kind::binary, std::move(text), std::move(value), (this->*next)());
    }
    return value;
  }
  ExpressionPtr sum() {
    static constexpr std::array<std::string_view, 2> kOperators = {"+", "-"};
    return chain(kOperators, &ExpressionParser::concatenation);
  }
  ExpressionPtr concatenation() {
    static constexpr std::array<std::string_view, 1> kOperators = {"~"};
    return chain(kOperators, &ExpressionParser::product);
  }
  ExpressionPtr product() {
    static constexpr std::array<std::string_view, 4> kOperators = {"*", "/", "//", "%"};
    return chain(kOperators, &ExpressionParser::filtered);
  }

  ExpressionPtr filtered() { return filters(sign()); }

  ExpressionPtr sign() {
    const Nesting nesting(*this);
    const size_t begin = scanner_.peek().begin;
    if (scanner_.take_symbol("-")) {
      ExpressionPtr value = make(Kind::minus, "", sign());
      value->begin = begin;
      return value;
    }
    return postfix(primary());
  }

  ExpressionPtr leaf(Kind kind, const Token& token, int64_t integer = 0) {
    auto value = std::make_unique<Expression>();
    value->kind = kind;
    value->text = token.text;
    value->integer = integer;
    value->begin = token.begin;
    value->end = token.end;
    return value;
  }

  ExpressionPtr primary() {
    Token token = scanner_.take();
    switch (token.kind) {
      case Token::Kind::name: return named(token);
      case Token::Kind::text:
        while (scanner_.peek().kind == Token::Kind::text) token.text += scanner_.take().text;
        return leaf(Kind::text, token);
      case Token::Kind::integer: {
        int64_t number = 0;
        const char* end = token.text.data() + token.text.size();
        const auto read = std::from_chars(token.text.data(), end, number);
        if (read.ec != std::errc() || read.ptr != end) {
          source_.refuse(token.begin, token.end,
                         "only decimal integers of 64 bits are supported as numbers");
        }
        return leaf(Kind::integer, token, number);
      }
      case Token::Kind::symbol:
        if (token.text == "(") return parenthesis(token);
        if (token.text == "[") return sequence(token);
        if (token.text == "{") return dictionary(token);
        break;
      case Token::Kind::end: break;
    }
    source_.refuse(token.begin, token.end, "expected an expression");
  }

  ExpressionPtr named(const Token& token) {
    if (token.text == "true" || token.text == "True") return leaf(Kind::boolean, token, 1);
    if (token.text == "false" || token.text == "False") return leaf(Kind::boolean, token, 0);
    if (token.text == "none" || token.text == "None") return leaf(Kind::none, token);
    for (const char* word : {"if", "else", "in", "is", "and", "or"}) {
      if (token.text == word) source_.refuse(token.begin, token.end, "expected an expression");
    }
    return leaf(Kind::name, token);
  }

  // One expression in parentheses is itself; with a comma it is a tuple, taken as a list.
  ExpressionPtr parenthesis(const Token& open) {
    ExpressionPtr list = leaf(Kind::list, open);
    bool tuple = scanner_.is_symbol(")");
    while (!scanner_.take_symbol(")")) {
      list->parts.push_back(expression());
      if (scanner_.take_symbol(","))
        tuple = true;
      else if (!scanner_.is_symbol(")"))
        expect(")");
    }
    if (tuple) return finished(std::move(list));
    return std::move(list->parts.front());
  }

  ExpressionPtr sequence(const Token& open) {
    ExpressionPtr list = leaf(Kind::list, open);
    while (!scanner_.take_symbol("]")) {
      list->parts.push_back(expression());
      if (!scanner_.take_symbol(",") && !scanner_.is_symbol("]")) expect("]");
    }
    return finished(std::move(list));
  }

  ExpressionPtr dictionary(const Token& open) {
    ExpressionPtr dict = leaf(Kind::dict, open);
    while (!scanner_.take_symbol("}")) {
      dict->parts.push_back(expression());
      expect(":");
      dict->parts.push_back(expression());
      if (!scanner_.take_symbol(",") && !scanner_.is_symbol("}")) expect("}");
    }
    return finished(std::move(dict));
  }

  ExpressionPtr postfix(ExpressionPtr value) {
    for (;;) {
      if (scanner_.take_symbol(".")) {
        const Token name = scanner_.take();
        if (name.kind != Token::Kind::name)
          source_.refuse(value->begin, name.end, "expected a name after the dot");
        value = make(Kind::member, name.text, std::move(value));
      } else if (scanner_.take_symbol("[")) {
        value = subscript(std::move(value));
      } else if (scanner_.take_symbol("(")) {
        value = call(std::move(value));
      } else {
        return value;
      }
    }
  }

  ExpressionPtr subscript(ExpressionPtr value) {
    std::array<ExpressionPtr, 3> bounds;
    size_t colons = 0;
    while (!scanner_.is_symbol("]")) {
      if (scanner_.take_symbol(":")) {
        if (++colons > 2) expect("]");
      } else if (bounds[colons] == nullptr) {
        bounds[colons] = expression();
      } else {
        expect("]");
      }
    }
    const Token close = scanner_.take();
    if (colons > 0) {
      return make(Kind::slice, "", std::move(value), std::move(bounds[0]), std::move(bounds[1]),
                  std::move(bounds[2]));
    }
    if (bounds[0] == nullptr) source_.refuse(value->begin, close.end, "expected an index");
    return make(Kind::index, "", std::move(value), std::move(bounds[0]));
  }

  ExpressionPtr call(ExpressionPtr callee) {
    ExpressionPtr value = make(Kind::call, "", std::move(callee));
    arguments(*value);
    return finished(std::move(value));
  }

  // From behind the opening parenthesis to behind the closing one.
  void arguments(Expression& into) {
    while (!scanner_.take_symbol(")")) {
      ExpressionPtr argument = expression();
      if (argument->kind == Kind::name && scanner_.take_symbol("=")) {
        into.keywords.emplace_back(argument->text, expression());
      } else {
        into.parts.push_back(std::move(argument));
      }
      if (!scanner_.take_symbol(",") && !scanner_.is_symbol(")")) expect(")");
    }
  }

  ExpressionPtr filters(ExpressionPtr value) {
    for (;;) {
      if (scanner_.take_symbol("|")) {
        const Token name = scanner_.take();
        if (name.kind != Token::Kind::name)
          source_.refuse(value->begin, name.end, "expected a filter's name");
        value = make(Kind::filter, name.text, std::move(value));
        if (scanner_.take_symbol("(")) arguments(*value);
        value = finished(std::move(value));
      } else if (scanner_.take_name("is")) {
        value = test(std::move(value));
      } else if (scanner_.take_symbol("(")) {
        value = call(std::move(value));
      } else {
        return value;
      }
    }
  }

  ExpressionPtr test(ExpressionPtr value) {
    const bool negated = scanner_.take_name("not");
    const Token name = scanner_.take();
    if (name.kind != Token::Kind::name)
      source_.refuse(value->begin, name.end, "expected a test's name");
    value = make(Kind::test, name.text, std::move(value));
    if (scanner_.take_symbol("(")) {
      arguments(*value);
      value = finished(std::move(value));
    }
    return negated ? make(Kind::negation, "", std::move(value)) : std::move(value);
  }

  void expect(std::string_view symbol) {
    if (scanner_.take_symbol(symbol)) return;
    const Token& token = scanner_.peek();
    source_.refuse(token.begin, token.end, concat("expected ", symbol));
  }

  const Source& source_;
  Scanner& scanner_;
  int depth_ = 0;
};

class Parser {
 public:
  explicit Parser(const Source& source) : source_(source) {}

  Block template_block() {
    std::string end;
    return statements({}, end);
  }

 private:
  // Statements up to one of the tags in `ends`, whose scanner is left in ending_ behind its name.
  Block statements(const std::vector<std::string_view>& ends, std::string& end) {
    if (++depth_ > kMaxDepth) {
      source_.refuse(at_, at_, concat("blocks nested deeper than ", kMaxDepth, " levels"));
    }
    Block block;
    end.clear();
    while (end.empty() && at_ < source_.text().size()) {
      literal(block);
      if (at_ < source_.text().size()) tag(block, ends, end);
    }
    if (end.empty() && !ends.empty()) {
      source_.refuse(opening_, at_, concat("the template ends before ", ends.back()));
    }
    --depth_;
    return block;
  }

  // Text up to the next tag, with the white space taken off that tags on either side ask for.
  void literal(Block& block) {
    const std::string_view source = source_.text();
    size_t open = at_;
    while (open < source.size() &&
           !(source[open] == '{' && open + 1 < source.size() &&
             std::string_view("{%#").find(source[open + 1]) != std::string_view::npos)) {
      ++open;
    }
    std::string_view text = source.substr(at_, open - at_);
    if (open + 2 < source.size() && source[open + 2] == '-') {
      text = strip_back(text);
    } else if (open < source.size() && source[open + 1] != '{' &&
               !(open + 2 < source.size() && source[open + 2] == '+')) {
      const size_t line = text.rfind('\n') + 1;  // npos + 1 is the beginning
      if ((line > 0 || line_begins_) && strip_front(text.substr(line)).empty())
        text = text.substr(0, line);
    }
    if (!text.empty()) {
      Statement statement;
      statement.kind = Statement::Kind::text;
      statement.text = text;
      block.push_back(std::move(statement));
    }
    at_ = open;
  }

  // Behind a tag: "-" takes all white space, a statement or comment takes one line end.
  void close(size_t behind, bool trims, bool trims_line) {
    const std::string_view source = source_.text();
    at_ = behind;
    if (trims)
      at_ = source.size() - strip_front(source.substr(at_)).size();
    else if (trims_line && at_ < source.size() && source[at_] == '\n')
      ++at_;
    line_begins_ = at_ > behind && source[at_ - 1] == '\n';
  }

  void tag(Block& block, const std::vector<std::string_view>& ends, std::string& end) {
    const std::string_view source = source_.text();
    const size_t begin = at_;
    const char kind = source[begin + 1];
    size_t inside = begin + 2;
    if (inside < source.size() && (source[inside] == '-' || source[inside] == '+')) ++inside;
    if (kind == '#') {
      const size_t hash = source.find("#}", inside);
      if (hash == std::string_view::npos)
        source_.refuse(begin, begin + 2, "a comment is not closed with #}");
      const bool sign = hash > inside && (source[hash - 1] == '-' || source[hash - 1] == '+');
      close(hash + 2, sign && source[hash - 1] == '-', !sign || source[hash - 1] != '+');
      return;
    }
    Scanner scanner(source_, inside, kind == '{' ? "}}" : "%}");
    if (kind == '{') {
      Statement statement = begun(Statement::Kind::output, begin);
      statement.value = ExpressionParser(source_, scanner).expression();
      finish(statement, scanner, false);
      block.push_back(std::move(statement));
      return;
    }
    const Token name = scanner.take();
    if (name.kind == Token::Kind::name &&
        std::find(ends.begin(), ends.end(), name.text) != ends.end()) {
      end = name.text;
      ending_.clear();
      if (name.text == "elif") {
        ending_.push_back(ExpressionParser(source_, scanner).disjunction());
      }
      Statement statement = begun(Statement::Kind::text, begin);
      finish(statement, scanner, true);
      return;
    }
    if (name.text == "if")
      block.push_back(condition(begin, scanner));
    else if (name.text == "for")
      block.push_back(loop(begin, scanner));
    else if (name.text == "set")
      block.push_back(assignment(begin, scanner));
    else if (name.text == "macro")
      block.push_back(macro(begin, scanner));
    else
      refuse_tag(begin, "this tag is unknown or out of place");
  }

  [[noreturn]] void refuse_tag(size_t begin, const std::string& reason) const {
    const size_t close = source_.text().find("%}", begin);
    source_.refuse(begin, close == std::string_view::npos ? source_.text().size() : close + 2,
                   reason);
  }

  Statement begun(Statement::Kind kind, size_t begin) {
    opening_ = begin;
    Statement statement;
    statement.kind = kind;
    statement.begin = begin;
    return statement;
  }

  // The tag must end here.
  void finish(Statement& statement, Scanner& scanner, bool trims_line) {
    if (!scanner.at_end()) {
      source_.refuse(statement.begin, scanner.peek().end, "expected the end of the tag");
    }
    statement.end = scanner.behind();
    close(scanner.behind(), scanner.trims(), trims_line && !scanner.keeps());
  }

  Statement condition(size_t begin, Scanner& scanner) {
    Statement statement = begun(Statement::Kind::condition, begin);
    ExpressionPtr test = ExpressionParser(source_, scanner).disjunction();
    finish(statement, scanner, true);
    std::string end = "elif";
    while (end == "elif") {
      Block body = statements({"elif", "else", "endif"}, end);
      statement.arms.push_back({std::move(test), std::move(body)});
      if (end == "elif") test = std::move(ending_.front());
    }
    if (end == "else") statement.arms.push_back({nullptr, statements({"endif"}, end)});
    return statement;
  }

  std::string target(Scanner& scanner) {
    const Token name = scanner.take();
    if (name.kind != Token::Kind::name) source_.refuse(name.begin, name.end, "expected a name");
    return name.text;
  }

  Statement loop(size_t begin, Scanner& scanner) {
    Statement statement = begun(Statement::Kind::loop, begin);
    do {
      statement.targets.push_back(target(scanner));
    } while (scanner.take_symbol(","));
    if (!scanner.take_name("in")) refuse_tag(begin, "expected \"in\"");
    ExpressionParser expressions(source_, scanner);
    statement.value = expressions.disjunction();
    if (scanner.take_name("if")) statement.condition = expressions.disjunction();
    finish(statement, scanner, true);
    std::string end;
    statement.body = statements({"else", "endfor"}, end);
    if (end == "else") statement.otherwise = statements({"endfor"}, end);
    return statement;
  }

  Statement assignment(size_t begin, Scanner& scanner) {
    Statement statement = begun(Statement::Kind::set, begin);
    statement.targets.push_back(target(scanner));
    if (scanner.take_symbol(".")) statement.member = target(scanner);
    if (scanner.take_symbol("=")) {
      statement.value = ExpressionParser(source_, scanner).expression();
      finish(statement, scanner, true);
      return statement;
    }
    finish(statement, scanner, true);
    std::string end;
    statement.body = statements({"endset"}, end);
    return statement;
  }

  Statement macro(size_t begin, Scanner& scanner) {
    Statement statement = begun(Statement::Kind::macro, begin);
    statement.text = target(scanner);
    if (!scanner.take_symbol("(")) refuse_tag(begin, "expected parameters in parentheses");
    while (!scanner.take_symbol(")")) {
      std::string name = target(scanner);
      ExpressionPtr otherwise;
      if (scanner.take_symbol("=")) otherwise = ExpressionParser(source_, scanner).expression();
      statement.parameters.emplace_back(std::move(name), std::move(otherwise));
      if (!scanner.take_symbol(",") && !scanner.is_symbol(")")) refuse_tag(begin, "expected )");
    }
    finish(statement, scanner, true);
    std::string end;
    statement.body = statements({"endmacro"}, end);
    return statement;
  }

  const Source& source_;
  size_t at_ = 0;
  size_t opening_ = 0;
  bool line_begins_ = true;
  int depth_ = 0;
  std::vector<ExpressionPtr> ending_;  // the condition of the elif that ended a block
};

}  // namespace

Block parse(const Source& source) { return Parser(source).template_block(); }

}  // namespace orrery::jinja

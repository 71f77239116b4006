#include "text/chat_template.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/budget.h"
#include "base/error.h"
#include "text/jinja_syntax.h"
#include "text/jinja_value.h"
#include "text/utf8.h"

namespace orrery {

namespace {

using jinja::Block;
using jinja::Expression;
using jinja::kMaxItems;
using jinja::kMaxTextBytes;
using jinja::List;
using jinja::Members;
using jinja::Source;
using jinja::Statement;
using jinja::Value;
using Type = Value::Type;
using Kind = Expression::Kind;

// A template comes with a checkpoint and may be wrong or hostile: its work, its text and the depth
// of what it builds are bounded, far above what conversations need.
constexpr Budget kBudget{100'000, 64 * kMaxTextBytes};
constexpr int kMaxValueDepth = 16;
constexpr int kMaxCalls = 16;

class Renderer {
 public:
  Renderer(const Source& source, Members globals) : source_(source) {
    scopes_.push_back(std::move(globals));
  }

  std::string render(const Block& block) {
    run(block);
    return std::move(out_);
  }

 private:
  [[noreturn]] void refuse(const Expression& at, const std::string& reason) const {
    source_.refuse(at.begin, at.end, reason);
  }
  // Refuses when the budget is used up.
  void spend(size_t begin, size_t end, int64_t steps, int64_t bytes) {
    budget_.spend(steps, bytes);
    if (budget_.steps < 0)
      source_.refuse(begin, end, concat("more than ", kBudget.steps, " steps"));
    if (budget_.bytes < 0)
      source_.refuse(begin, end, concat("more than ", kBudget.bytes, " bytes handled"));
  }
  void step(size_t begin, size_t end) { spend(begin, end, 1, 0); }
  // Going through a text, or through its code points.
  void read(const Expression& at, std::string_view text) {
    spend(at.begin, at.end, 0, static_cast<int64_t>(text.size()));
  }
  void read_code_points(const Expression& at, std::string_view text) {
    spend(at.begin, at.end, 0, static_cast<int64_t>((1 + sizeof(size_t)) * text.size()));
  }
  void copy(const Expression& at, const List& items) {
    spend(at.begin, at.end, 0, jinja::bytes_of(items));
  }
  std::string bounded(std::string text, size_t begin, size_t end) const {
    if (text.size() > kMaxTextBytes) {
      source_.refuse(begin, end, concat("a text of more than ", kMaxTextBytes, " bytes"));
    }
    return text;
  }

  // --- statements

  void run(const Block& block) {
    for (const Statement& statement : block) {
      step(statement.begin, statement.end);
      switch (statement.kind) {
        case Statement::Kind::text: emit(statement.text, statement); break;
        case Statement::Kind::output:
          emit(printed(evaluate(*statement.value), *statement.value), statement);
          break;
        case Statement::Kind::condition: run_condition(statement); break;
        case Statement::Kind::loop: run_loop(statement); break;
        case Statement::Kind::set: run_set(statement); break;
        case Statement::Kind::macro: {
          Value value;
          value.type = Type::macro;
          value.macro = &statement;
          scopes_.back()[statement.text] = std::move(value);
          break;
        }
      }
    }
  }

  void emit(std::string_view text, const Statement& statement) {
    out_ += text;
    if (out_.size() > kMaxTextBytes) {
      source_.refuse(statement.begin, statement.end,
                     concat("renders more than ", kMaxTextBytes, " bytes"));
    }
  }

  void run_condition(const Statement& statement) {
    for (const Statement::Arm& arm : statement.arms) {
      if (arm.condition == nullptr || evaluate(*arm.condition).truthy()) {
        run(arm.body);
        return;
      }
    }
  }

  void bind_targets(const Statement& statement, const Value& item) {
    if (statement.targets.size() == 1) {
      scopes_.back()[statement.targets.front()] = item;
      return;
    }
    if (!item.is(Type::list) || item.list->size() != statement.targets.size()) {
      source_.refuse(statement.begin, statement.end,
                     concat("an item is not a list of ", statement.targets.size(), " parts"));
    }
    for (size_t i = 0; i < statement.targets.size(); ++i)
      scopes_.back()[statement.targets[i]] = (*item.list)[i];
  }

  void run_loop(const Statement& statement) {
    List items = iterated(evaluate(*statement.value), *statement.value);
    if (statement.condition != nullptr) {
      List kept;
      for (Value& item : items) {
        scopes_.emplace_back();
        bind_targets(statement, item);
        step(statement.begin, statement.end);
        if (evaluate(*statement.condition).truthy()) kept.push_back(std::move(item));
        scopes_.pop_back();
      }
      items = std::move(kept);
    }
    if (items.empty()) {
      run(statement.otherwise);
      return;
    }
    const auto count = static_cast<int64_t>(items.size());
    constexpr int64_t kScopeBytes = 1024;  // names of one turn, without the texts of its items
    for (int64_t i = 0; i < count; ++i) {
      const auto text = static_cast<int64_t>(items[static_cast<size_t>(i)].text.size());
      spend(statement.begin, statement.end, 1, kScopeBytes + 3 * text);  // item, next, previous
      scopes_.emplace_back();
      bind_targets(statement, items[static_cast<size_t>(i)]);
      Members loop{{"index0", Value::of(i)},
                   {"index", Value::of(i + 1)},
                   {"first", Value::of(i == 0)},
                   {"last", Value::of(i + 1 == count)},
                   {"length", Value::of(count)},
                   {"revindex", Value::of(count - i)},
                   {"revindex0", Value::of(count - i - 1)}};
      if (i > 0) loop["previtem"] = items[static_cast<size_t>(i - 1)];
      if (i + 1 < count) loop["nextitem"] = items[static_cast<size_t>(i + 1)];
      scopes_.back()["loop"] = Value::of(std::move(loop));
      run(statement.body);
      scopes_.pop_back();
    }
  }

  List iterated(const Value& value, const Expression& at) {
    if (value.is(Type::list)) {
      copy(at, *value.list);
      return *value.list;
    }
    if (value.is(Type::undefined)) return {};
    if (value.is(Type::dict)) {
      List names;
      for (const auto& entry : *value.members) names.push_back(Value::of(entry.first));
      copy(at, names);
      return names;
    }
    refuse(at, "only lists and dicts can be looped over");
  }

  void run_set(const Statement& statement) {
    Value value = statement.value != nullptr ? evaluate(*statement.value)
                                             : Value::of(captured(statement.body));
    const std::string& target = statement.targets.front();
    if (statement.member.empty()) {
      scopes_.back()[target] = std::move(value);
      return;
    }
    Value* space = find(target);
    if (space == nullptr || !space->is(Type::space)) {
      source_.refuse(statement.begin, statement.end, concat(target, " is not a namespace"));
    }
    check_contained(value, statement.begin, statement.end);
    (*space->members)[statement.member] = std::move(value);
  }

  std::string captured(const Block& body) {
    std::string outer = std::exchange(out_, {});
    run(body);
    return std::exchange(out_, std::move(outer));
  }

  // Namespaces are shared and changed: inside another value one could come to hold itself.
  void check_contained(const Value& value, size_t begin, size_t end) const {
    if (value.is(Type::space))
      source_.refuse(begin, end, "a namespace inside another value is not supported");
    if (value.depth >= kMaxValueDepth) {
      source_.refuse(begin, end, concat("values nested deeper than ", kMaxValueDepth, " levels"));
    }
  }

  // --- names and values

  Value* find(const std::string& name) {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (const auto found = scope->find(name); found != scope->end()) return &found->second;
    }
    return nullptr;
  }

  static Value undefined(std::string spelling) {
    Value value;
    value.text = std::move(spelling);
    return value;
  }

  std::string printed(const Value& value, const Expression& at) const {
    switch (value.type) {
      case Type::undefined: return {};
      case Type::none: return "None";
      case Type::boolean: return value.integer != 0 ? "True" : "False";
      case Type::integer: return concat(value.integer);
      case Type::text: return value.text;
      default: refuse(at, "only texts, integers, booleans and none can be written");
    }
  }

  Value evaluate(const Expression& e) {
    step(e.begin, e.end);
    Value value = value_of(e);
    read(e, value.text);
    return value;
  }

  Value value_of(const Expression& e) {
    switch (e.kind) {
      case Kind::text: return Value::of(e.text);
      case Kind::integer: return Value::of(e.integer);
      case Kind::boolean: return Value::of(e.integer != 0);
      case Kind::none: return Value::none();
      case Kind::name: {
        const Value* value = find(e.text);
        return value != nullptr ? *value : undefined(e.text);
      }
      case Kind::list: return list_of(e);
      case Kind::dict: return dict_of(e);
      case Kind::member: return member(e, evaluate(*e.parts[0]), e.text);
      case Kind::index: return index(e, evaluate(*e.parts[0]), evaluate(*e.parts[1]));
      case Kind::slice: return slice(e);
      case Kind::call: return call(e);
      case Kind::filter: return filter(e);
      case Kind::test: return Value::of(test(e));
      case Kind::negation: return Value::of(!evaluate(*e.parts[0]).truthy());
      case Kind::minus: return minus(e);
      case Kind::either: {
        Value left = evaluate(*e.parts[0]);
        return left.truthy() ? left : evaluate(*e.parts[1]);
      }
      case Kind::both: {
        Value left = evaluate(*e.parts[0]);
        return left.truthy() ? evaluate(*e.parts[1]) : left;
      }
      case Kind::binary: return binary(e, evaluate(*e.parts[0]), evaluate(*e.parts[1]));
      case Kind::conditional:
        if (evaluate(*e.parts[1]).truthy()) return evaluate(*e.parts[0]);
        return e.parts[2] != nullptr ? evaluate(*e.parts[2]) : undefined("");
    }
    refuse(e, "not understood");
  }

  Value list_of(const Expression& e) {
    List items;
    for (const auto& part : e.parts) {
      items.push_back(evaluate(*part));
      check_contained(items.back(), e.begin, e.end);
    }
    copy(e, items);
    return Value::of(std::move(items));
  }

  Value dict_of(const Expression& e) {
    Members members;
    for (size_t i = 0; i < e.parts.size(); i += 2) {
      const Value key = evaluate(*e.parts[i]);
      if (!key.is(Type::text)) refuse(*e.parts[i], "only texts can be keys");
      Value value = evaluate(*e.parts[i + 1]);
      check_contained(value, e.begin, e.end);
      members[key.text] = std::move(value);
    }
    return Value::of(std::move(members));
  }

  Value member(const Expression& e, const Value& object, const std::string& name) const {
    if (object.is(Type::undefined))
      refuse(e, concat(object.text.empty() ? "a value" : object.text, " is undefined"));
    if (object.members != nullptr) {
      if (const auto found = object.members->find(name); found != object.members->end())
        return found->second;
    }
    return undefined(name);
  }

  Value index(const Expression& e, const Value& object, const Value& key) {
    if (key.is(Type::text)) return member(e, object, key.text);
    if (!key.is_number()) refuse(e, "an index must be a text or an integer");
    if (object.is(Type::list)) {
      const auto size = static_cast<int64_t>(object.list->size());
      const int64_t at = key.integer < 0 ? key.integer + size : key.integer;
      return at >= 0 && at < size ? (*object.list)[static_cast<size_t>(at)] : undefined("an item");
    }
    if (object.is(Type::text)) {
      read_code_points(e, object.text);
      const std::vector<size_t> at = jinja::boundaries(object.text);
      const auto size = static_cast<int64_t>(at.size()) - 1;
      const int64_t i = key.integer < 0 ? key.integer + size : key.integer;
      if (i < 0 || i >= size) return undefined("a character");
      const auto k = static_cast<size_t>(i);
      return Value::of(object.text.substr(at[k], at[k + 1] - at[k]));
    }
    refuse(e, "only lists and texts have items by number");
  }

  std::optional<int64_t> bound(const Expression& e, size_t part) {
    if (e.parts[part] == nullptr) return std::nullopt;
    const Value value = evaluate(*e.parts[part]);
    if (value.is(Type::none)) return std::nullopt;
    if (!value.is_number()) refuse(*e.parts[part], "a bound of a slice must be an integer");
    return value.integer;
  }

  Value slice(const Expression& e) {
    const Value object = evaluate(*e.parts[0]);
    if (!object.is(Type::list) && !object.is(Type::text))
      refuse(e, "only lists and texts can be sliced");
    if (object.is(Type::text))
      read_code_points(e, object.text);
    else
      copy(e, *object.list);
    const std::vector<size_t> at =
        object.is(Type::text) ? jinja::boundaries(object.text) : std::vector<size_t>{};
    const auto size =
        static_cast<int64_t>(object.is(Type::text) ? at.size() - 1 : object.list->size());
    const int64_t stride = bound(e, 3).value_or(1);
    if (stride == 0 || stride < -size - 1 || stride > size + 1) {
      if (stride == 0) refuse(e, "the step of a slice is 0");
      refuse(e, "the step of a slice is larger than what is sliced");
    }
    const auto clamp = [&](std::optional<int64_t> given, int64_t absent) {
      if (!given) return absent;
      const int64_t i = *given < 0 ? *given + size : *given;
      return stride > 0 ? std::clamp<int64_t>(i, 0, size) : std::clamp<int64_t>(i, -1, size - 1);
    };
    const int64_t first = clamp(bound(e, 1), stride > 0 ? 0 : size - 1);
    const int64_t last = clamp(bound(e, 2), stride > 0 ? size : -1);
    List items;
    std::string text;
    for (int64_t i = first; stride > 0 ? i < last : i > last; i += stride) {
      const auto k = static_cast<size_t>(i);
      if (object.is(Type::list))
        items.push_back((*object.list)[k]);
      else
        text.append(object.text, at[k], at[k + 1] - at[k]);
    }
    return object.is(Type::list) ? Value::of(std::move(items)) : Value::of(std::move(text));
  }

  void check_count(const Expression& e, size_t items) const {
    if (items > kMaxItems) refuse(e, concat("a list of more than ", kMaxItems, " items"));
  }

  // --- operators

  Value minus(const Expression& e) {
    const Value value = evaluate(*e.parts[0]);
    int64_t result = 0;
    if (!value.is_number() || __builtin_sub_overflow(int64_t{0}, value.integer, &result)) {
      refuse(e, "the minus sign needs an integer");
    }
    return Value::of(result);
  }

  Value binary(const Expression& e, const Value& a, const Value& b) {
    const std::string& op = e.text;
    if (op == "==") return Value::of(equal(e, a, b));
    if (op == "!=") return Value::of(!equal(e, a, b));
    if (op == "in") return Value::of(contains(e, a, b));
    if (op == "not in") return Value::of(!contains(e, a, b));
    if (op == "~") {
      return Value::of(bounded(printed(a, *e.parts[0]) + printed(b, *e.parts[1]), e.begin, e.end));
    }
    if (op == "+" && a.is(Type::text) && b.is(Type::text)) {
      return Value::of(bounded(a.text + b.text, e.begin, e.end));
    }
    if (op == "+" && a.is(Type::list) && b.is(Type::list)) {
      copy(e, *a.list);
      copy(e, *b.list);
      List items = *a.list;
      items.insert(items.end(), b.list->begin(), b.list->end());
      check_count(e, items.size());
      return Value::of(std::move(items));
    }
    if (a.is(Type::text) && b.is(Type::text) && (op[0] == '<' || op[0] == '>')) {
      return Value::of(ordered(op, a.text.compare(b.text)));
    }
    if (!a.is_number() || !b.is_number())
      refuse(e, concat("the operands of ", op, " do not fit together"));
    if (op[0] == '<' || op[0] == '>') {
      return Value::of(ordered(op, a.integer < b.integer ? -1 : a.integer > b.integer));
    }
    if (op == "/" || op == "**") refuse(e, concat("the operator ", op, " is not supported"));
    const std::optional<int64_t> result = jinja::arithmetic(op, a.integer, b.integer);
    if (!result) refuse(e, concat(op, " has no result of 64 bits"));
    return Value::of(*result);
  }

  static bool ordered(const std::string& op, int order) {
    if (op == "<") return order < 0;
    if (op == "<=") return order <= 0;
    if (op == ">") return order > 0;
    return order >= 0;
  }

  bool equal(const Expression& e, const Value& a, const Value& b) {
    const bool same = jinja::equal(a, b, budget_);
    spend(e.begin, e.end, 0, 0);
    return same;
  }

  bool contains(const Expression& e, const Value& item, const Value& container) {
    if (container.is(Type::text) && item.is(Type::text)) {
      read(e, container.text);
      return jinja::find_text(container.text, item.text) != std::string_view::npos;
    }
    if (container.is(Type::list)) {
      return std::any_of(container.list->begin(), container.list->end(),
                         [&](const Value& entry) { return equal(e, entry, item); });
    }
    if (container.is(Type::dict) && item.is(Type::text))
      return container.members->count(item.text) > 0;
    if (container.is(Type::undefined)) return false;
    refuse(e, "the right side cannot hold the left");
  }

  // --- filters, tests, calls

  size_t length_of(const Expression& e, const Value& value) {
    if (value.is(Type::text)) {
      read(e, value.text);
      return count_code_points(value.text);
    }
    if (value.is(Type::list)) return value.list->size();
    if (value.is(Type::dict)) return value.members->size();
    if (value.is(Type::undefined)) return 0;
    refuse(e, "only texts, lists and dicts have a length");
  }

  Value filter(const Expression& e) {
    Value value = evaluate(*e.parts[0]);
    const size_t given = e.parts.size() - 1;
    const auto takes = [&](std::string_view name, size_t most) {
      return e.text == name && given <= most && e.keywords.empty();
    };
    if (takes("length", 0) || takes("count", 0))
      return Value::of(static_cast<int64_t>(length_of(e, value)));
    if (takes("string", 0)) return Value::of(printed(value, e));
    if (takes("trim", 0)) return Value::of(jinja::trimmed(printed(value, e)));
    if (takes("default", 2) || takes("d", 2)) {
      const bool falsy = given == 2 && evaluate(*e.parts[2]).truthy();
      if (!value.is(Type::undefined) && !(falsy && !value.truthy())) return value;
      return given > 0 ? evaluate(*e.parts[1]) : Value::of(std::string());
    }
    if ((takes("first", 0) || takes("last", 0)) && value.is(Type::list)) {
      if (value.list->empty()) return undefined("an item");
      return e.text == "first" ? value.list->front() : value.list->back();
    }
    refuse(e, concat("the filter ", e.text, " is not supported with these operands"));
  }

  bool test(const Expression& e) {
    const Value value = evaluate(*e.parts[0]);
    const bool alone = e.parts.size() == 1 && e.keywords.empty();
    const std::optional<bool> passes = alone ? jinja::passes_test(value, e.text) : std::nullopt;
    if (!passes) refuse(e, concat("the test ", e.text, " is not supported with these operands"));
    return *passes;
  }

  Value call(const Expression& e) {
    const Expression& callee = *e.parts[0];
    if (callee.kind == Kind::member) return method(e, callee);
    if (callee.kind != Kind::name) refuse(e, "this cannot be called");
    if (const Value* value = find(callee.text)) {
      if (!value->is(Type::macro)) refuse(e, concat(callee.text, " cannot be called"));
      return call_macro(e, *value->macro);
    }
    if (callee.text == "namespace" && e.parts.size() == 1) {
      Members members;
      for (const auto& [name, part] : e.keywords) {
        members[name] = evaluate(*part);
        check_contained(members[name], e.begin, e.end);
      }
      return Value::of(std::move(members), Type::space);
    }
    if (callee.text == "raise_exception" && e.parts.size() == 2 && e.keywords.empty()) {
      refuse(e, concat("the template objects: ", printed(evaluate(*e.parts[1]), e)));
    }
    refuse(e, concat("the function ", callee.text, " is not supported with these operands"));
  }

  // A macro sees its parameters and the names of the template itself, not those of its caller.
  Value call_macro(const Expression& e, const Statement& macro) {
    if (++calls_ > kMaxCalls)
      refuse(e, concat("macros call each other more than ", kMaxCalls, " deep"));
    Members scope;
    for (size_t i = 0; i < macro.parameters.size(); ++i) {
      const auto& [name, otherwise] = macro.parameters[i];
      const auto keyword =
          std::find_if(e.keywords.begin(), e.keywords.end(),
                       [&, &wanted = name](const auto& k) { return k.first == wanted; });
      if (i + 1 < e.parts.size())
        scope[name] = evaluate(*e.parts[i + 1]);
      else if (keyword != e.keywords.end())
        scope[name] = evaluate(*keyword->second);
      else if (otherwise != nullptr)
        scope[name] = evaluate(*otherwise);
      else
        scope[name] = undefined(name);
    }
    const bool surplus = e.parts.size() - 1 > macro.parameters.size() ||
                         std::any_of(e.keywords.begin(), e.keywords.end(), [&](const auto& k) {
                           return scope.find(k.first) == scope.end();
                         });
    if (surplus) refuse(e, concat("the macro ", macro.text, " has no such parameter"));
    std::vector<Members> outer;
    outer.reserve(scopes_.size());
    std::move(scopes_.begin() + 1, scopes_.end(), std::back_inserter(outer));
    scopes_.resize(1);
    scopes_.push_back(std::move(scope));
    Value result = Value::of(captured(macro.body));
    scopes_.resize(1);
    std::move(outer.begin(), outer.end(), std::back_inserter(scopes_));
    --calls_;
    return result;
  }

  Value method(const Expression& e, const Expression& callee) {
    const Value object = evaluate(*callee.parts[0]);
    const std::string& name = callee.text;
    List arguments;
    for (size_t i = 1; i < e.parts.size(); ++i) arguments.push_back(evaluate(*e.parts[i]));
    const size_t given = arguments.size();
    if (object.is(Type::dict) && name == "get" && (given == 1 || given == 2) &&
        arguments[0].is(Type::text)) {
      const auto found = object.members->find(arguments[0].text);
      if (found != object.members->end()) return found->second;
      return given == 2 ? arguments[1] : Value::none();
    }
    if (object.is(Type::text) && e.keywords.empty()) {
      read_code_points(e, object.text);
      if (std::optional<Value> result = jinja::call_text_method(object.text, name, arguments)) {
        if (result->is(Type::list)) {
          check_count(e, result->list->size());
          copy(e, *result->list);
        }
        result->text = bounded(std::move(result->text), e.begin, e.end);
        return *std::move(result);
      }
    }
    refuse(e, concat("the method ", name, " is not supported with these operands"));
  }

  const Source& source_;
  std::vector<Members> scopes_;  // the template's own first
  std::string out_;
  Budget budget_ = kBudget;
  int calls_ = 0;
};

}  // namespace

struct ChatTemplate::Parsed {
  Parsed(std::string_view text, const std::string& origin)
      : source(text, origin), block(jinja::parse(source)) {}
  Source source;
  Block block;
};

ChatTemplate::ChatTemplate(std::string_view source, const std::string& origin)
    : parsed_(std::make_unique<Parsed>(source, origin)) {}
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;
ChatTemplate::~ChatTemplate() = default;

std::string ChatTemplate::render(const std::vector<Message>& conversation,
                                 const std::vector<Named>& variables) const {
  List messages;
  for (const Message& message : conversation) {
    require(message.content.size() <= kMaxTextBytes, "the ", message.role, " message has ",
            message.content.size(), " bytes, more than the ", kMaxTextBytes,
            " that a prompt may have");
    messages.push_back(Value::of(Members{{"role", Value::of(valid_utf8(message.role))},
                                         {"content", Value::of(valid_utf8(message.content))}}));
  }
  Members globals;
  for (const auto& [name, text] : variables) globals[name] = Value::of(text);
  globals["messages"] = Value::of(std::move(messages));
  globals["add_generation_prompt"] = Value::of(true);
  globals["add_vision_id"] = Value::of(false);
  globals["tools"] = Value::none();
  globals["documents"] = Value::none();
  return Renderer(parsed_->source, std::move(globals)).render(parsed_->block);
}

}  // namespace orrery

#include "text/tokenizer.h"

#include <fstream>
#include <sstream>

#include "base/error.h"
#include "base/json.h"
#include "text/merges.h"
#include "text/normal_form.h"
#include "text/split_pattern.h"
#include "text/utf8.h"
#include "text/vocabulary.h"

namespace orrery {

namespace {

const Json* present(const Json& object, std::string_view key) {
  const Json* value = object.find(key);
  return value != nullptr && !value->is_null() ? value : nullptr;
}

bool flag(const Json& object, std::string_view key, bool absent) {
  const Json* value = present(object, key);
  return value == nullptr ? absent : value->as_bool();
}

// A flag that this knows in one state only.
void require_flag(const Json& object, std::string_view key, bool wanted, bool absent) {
  require(flag(object, key, absent) == wanted, ErrorKind::unsupported, object.where(), ": ", key,
          " ", wanted ? "false" : "true", " is not supported, only ", wanted ? "true" : "false");
}

const std::string& type_of(const Json& object) { return object.at("type").as_string(); }

void require_type(const Json& object, std::string_view wanted, std::string_view role) {
  require(type_of(object) == wanted, ErrorKind::unsupported, object.where(), ": the ", role, " \"",
          type_of(object), "\" is not supported, only \"", wanted, "\"");
}

bool normalizes(const Json& file) {
  const Json* normalizer = present(file, "normalizer");
  if (normalizer != nullptr) require_type(*normalizer, "NFC", "normalizer");
  return normalizer != nullptr;
}

SplitPattern pattern_of(const Json& file) {
  const Json& sequence = file.at("pre_tokenizer");
  require(sequence.is_object(), ErrorKind::unsupported, sequence.where(),
          ": a pre_tokenizer is needed, a Sequence of Split and ByteLevel");
  require_type(sequence, "Sequence", "pre_tokenizer");
  const Json& steps = sequence.at("pretokenizers");
  require(steps.items().size() == 2, ErrorKind::unsupported, steps.where(), ": has ",
          steps.items().size(), " steps; only Split followed by ByteLevel is supported");
  const Json& split = steps.at(size_t{0});
  const Json& bytes = steps.at(size_t{1});
  require_type(split, "Split", "pre_tokenizer");
  require(split.at("behavior").as_string() == "Isolated", ErrorKind::unsupported, split.where(),
          ": the behavior \"", split.at("behavior").as_string(),
          "\" is not supported, only \"Isolated\"");
  require_flag(split, "invert", false, false);
  const Json* pattern = split.at("pattern").find("Regex");
  require(pattern != nullptr, ErrorKind::unsupported, split.where(),
          ": only a pattern of the kind \"Regex\" is supported");
  require_type(bytes, "ByteLevel", "pre_tokenizer");
  require_flag(bytes, "add_prefix_space", false, true);
  require_flag(bytes, "use_regex", false, true);
  return SplitPattern(pattern->as_string(), split.where());
}

// What a post-processor adds is never wanted here, but some kinds change the text as well.
void check_post_processor(const Json& step) {
  const std::string& type = type_of(step);
  if (type == "Sequence") {
    for (const Json& part : step.at("processors").items()) check_post_processor(part);
    return;
  }
  require(
      type == "ByteLevel" || type == "TemplateProcessing", ErrorKind::unsupported, step.where(),
      ": the post_processor \"", type,
      "\" is not supported, only \"ByteLevel\", \"TemplateProcessing\" and a \"Sequence\" of them");
}

// unk_token, fuse_unk and byte_fallback speak of symbols outside the vocabulary; all 256 are in it.
void check_model(const Json& model) {
  require_type(model, "BPE", "model");
  const Json* dropout = present(model, "dropout");
  require(dropout == nullptr || dropout->as_double() == 0, ErrorKind::unsupported, model.where(),
          ": dropout is not supported: it makes ids random");
  for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const Json* text = present(model, affix);
    require(text == nullptr || text->as_string().empty(), ErrorKind::unsupported, model.where(),
            ": ", affix, " \"", text == nullptr ? "" : text->as_string(),
            "\" is not supported, only \"\"");
  }
}

Vocabulary vocabulary_of(const Json& model) {
  const Json& entries = model.at("vocab");
  Vocabulary vocabulary(entries.members().size());
  const std::string origin = entries.where();
  for (const auto& [text, id] : entries.members()) {
    require(id.is_integer(), ErrorKind::corrupt, origin, ": the id of \"", text,
            "\" is not an integer");
    vocabulary.add(text, id.as_int(), origin);
  }
  return vocabulary;
}

std::pair<std::string_view, std::string_view> pair_of(const Json& entry,
                                                      const std::string& origin) {
  if (entry.is_array()) {
    require(entry.items().size() == 2, ErrorKind::corrupt, origin, ": a merge of ",
            entry.items().size(), " parts; there must be 2");
    return {entry.at(size_t{0}).as_string(), entry.at(size_t{1}).as_string()};
  }
  const std::string_view text = entry.as_string();
  const size_t blank = text.find(' ');
  require(blank != std::string_view::npos && text.find(' ', blank + 1) == std::string_view::npos,
          ErrorKind::corrupt, origin, ": the merge \"", text,
          "\" must be two parts with one blank between");
  return {text.substr(0, blank), text.substr(blank + 1)};
}

Merges merges_of(const Json& model, const Vocabulary& vocabulary, const ByteAlphabet& alphabet) {
  const std::string origin = model.where();
  std::array<int32_t, 256> symbol;
  for (int byte = 0; byte < 256; ++byte) {
    const std::string& text = alphabet.symbol(static_cast<unsigned char>(byte));
    const std::optional<int32_t> id = vocabulary.find(text);
    require(id.has_value(), ErrorKind::corrupt, origin, ": the vocabulary lacks \"", text,
            "\", the symbol of byte ", byte);
    symbol[static_cast<size_t>(byte)] = *id;
  }
  const std::vector<Json>& entries = model.at("merges").items();
  std::vector<Merges::Rule> rules;
  rules.reserve(entries.size());
  std::string joined;
  const auto id_of = [&](std::string_view text) {
    const std::optional<int32_t> id = vocabulary.find(text);
    require(id.has_value(), ErrorKind::corrupt, origin, ": merge ", rules.size(), " needs \"", text,
            "\", which is not in the vocabulary");
    return *id;
  };
  for (const Json& entry : entries) {
    const auto [left, right] = pair_of(entry, origin);
    (joined = left) += right;
    rules.push_back({id_of(left), id_of(right), id_of(joined)});
  }
  return Merges(rules, symbol);
}

AddedTokens added_tokens_of(const Json& file, Vocabulary& vocabulary) {
  AddedTokens added;
  const Json* entries = present(file, "added_tokens");
  if (entries == nullptr) return added;
  for (const Json& entry : entries->items()) {
    const std::string& text = entry.at("content").as_string();
    const int64_t id = entry.at("id").as_int();
    require(!text.empty(), ErrorKind::corrupt, entry.where(), ": an added token without text");
    for (const char* key : {"single_word", "lstrip", "rstrip", "normalized"}) {
      require(!flag(entry, key, false), ErrorKind::unsupported, entry.where(),
              ": the added token \"", text, "\" has ", key, " true, which is not supported");
    }
    const std::optional<int32_t> known = vocabulary.find(text);
    if (!known.has_value() || *known != id) vocabulary.add(text, id, entry.where());
    require(added.text(id) == nullptr, ErrorKind::corrupt, entry.where(), ": the added token \"",
            text, "\" is listed twice");
    added.add(text, static_cast<int32_t>(id));
  }
  return added;
}

std::string read_text(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  require(in.good() && text.good(), ErrorKind::corrupt, file.string(), ": cannot read the file");
  return text.str();
}

// A token is given as a string or as an object with its content.
std::optional<std::string> token_text(const Json& value) {
  if (value.is_string()) return value.as_string();
  if (value.is_object() && value.has("content")) return value.at("content").as_string();
  return std::nullopt;
}

// One template, or a list of named ones of which "default" is meant.
std::string template_of(const Json& value) {
  if (value.is_string()) return value.as_string();
  for (const Json& choice : value.items()) {
    if (choice.at("name").as_string() == "default") return choice.at("template").as_string();
  }
  fail(ErrorKind::corrupt, value.where(), ": none of the chat templates is named \"default\"");
}

}  // namespace

struct Tokenizer::Impl {
  Impl(const Json& file, std::string source)
      : origin(std::move(source)),
        normalize(normalizes(file)),
        pattern(pattern_of(file)),
        vocabulary(vocabulary_of(file.at("model"))),
        merges(merges_of(file.at("model"), vocabulary, alphabet)),
        added(added_tokens_of(file, vocabulary)),
        whole_pieces(flag(file.at("model"), "ignore_merges", false)) {}

  void encode_plain(std::string_view text, SplitPattern::Matcher& matcher,
                    std::vector<int64_t>& ids) const;
  bool encode_whole(std::string_view piece, std::vector<int64_t>& ids) const;

  std::string origin;
  ByteAlphabet alphabet;
  bool normalize;
  SplitPattern pattern;
  Vocabulary vocabulary;
  Merges merges;
  AddedTokens added;
  bool whole_pieces;  // ignore_merges: a piece that is an entry is that entry, whatever the merges
                      // say
  std::vector<Named> special_tokens;
  std::optional<int64_t> eos;
  std::string chat_template;
};

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

namespace {

// Checked first so that the type of a foreign file is what the message is about.
Json checked(Json file) {
  check_model(file.at("model"));
  if (const Json* step = present(file, "post_processor")) check_post_processor(*step);
  const Json& decoder = file.at("decoder");
  require(decoder.is_object(), ErrorKind::unsupported, decoder.where(),
          ": a decoder is needed, only \"ByteLevel\" is supported");
  require_type(decoder, "ByteLevel", "decoder");
  return file;
}

}  // namespace

Tokenizer Tokenizer::from_json(std::string_view tokenizer_json, const std::string& origin) {
  return Tokenizer(std::make_unique<Impl>(checked(Json::parse(tokenizer_json, origin)), origin));
}

Tokenizer Tokenizer::load(const std::filesystem::path& folder) {
  auto impl =
      std::make_unique<Impl>(checked(Json::load(folder / "tokenizer.json")), folder.string());
  const std::filesystem::path config_file = folder / "tokenizer_config.json";
  if (std::filesystem::exists(config_file)) {
    const Json config = Json::load(config_file);
    for (const auto& [name, value] : config.members()) {
      if (!name.ends_with("_token")) continue;
      if (std::optional<std::string> text = token_text(value))
        impl->special_tokens.push_back({name, *text});
    }
    if (const Json* eos = present(config, "eos_token")) {
      const std::optional<std::string> text = token_text(*eos);
      require(text.has_value(), ErrorKind::corrupt, eos->where(),
              ": must be a string or an object with \"content\"");
      const std::optional<int32_t> id = impl->vocabulary.find(*text);
      require(id.has_value(), ErrorKind::corrupt, config_file.string(), ": the eos_token \"", *text,
              "\" is not in tokenizer.json");
      impl->eos = *id;
    }
    if (const Json* text = present(config, "chat_template"))
      impl->chat_template = template_of(*text);
  }
  const std::filesystem::path template_file = folder / "chat_template.jinja";
  if (std::filesystem::exists(template_file)) impl->chat_template = read_text(template_file);
  return Tokenizer(std::move(impl));
}

std::vector<int64_t> Tokenizer::encode(std::string_view text) const {
  const std::string valid = valid_utf8(text);
  std::vector<int64_t> ids;
  ids.reserve(valid.size() / 3);
  SplitPattern::Matcher matcher(impl_->pattern);
  for (size_t begin = 0; begin < valid.size();) {
    const AddedTokens::Match match = impl_->added.find(valid, begin);
    impl_->encode_plain(std::string_view(valid).substr(begin, match.begin - begin), matcher, ids);
    if (match.id >= 0) ids.push_back(match.id);
    begin = match.end;
  }
  return ids;
}

void Tokenizer::Impl::encode_plain(std::string_view text, SplitPattern::Matcher& matcher,
                                   std::vector<int64_t>& ids) const {
  const std::string normal = normalize ? nfc(text) : std::string(text);
  matcher.start(normal);
  for (std::string_view piece = matcher.next(); !piece.empty(); piece = matcher.next()) {
    if (!whole_pieces || !encode_whole(piece, ids)) merges.encode(piece, ids);
  }
}

bool Tokenizer::Impl::encode_whole(std::string_view piece, std::vector<int64_t>& ids) const {
  std::string spelled;
  for (const char byte : piece) spelled += alphabet.symbol(static_cast<unsigned char>(byte));
  const std::optional<int32_t> id = vocabulary.find(spelled);
  if (id.has_value()) ids.push_back(*id);
  return id.has_value();
}

std::string Tokenizer::decode(std::span<const int64_t> ids) const {
  std::string bytes;
  for (const int64_t id : ids) {
    if (const std::string* text = impl_->added.text(id)) {
      bytes += *text;
      continue;
    }
    const std::optional<std::string_view> spelled = impl_->vocabulary.text(id);
    require(spelled.has_value(), impl_->origin, ": the token id ", id,
            " is not in the vocabulary of ", vocab_size(), " ids");
    const std::optional<std::string> part = impl_->alphabet.bytes_of(*spelled);
    bytes += part.has_value() ? *part : *spelled;
  }
  return valid_utf8(bytes);
}

int64_t Tokenizer::vocab_size() const { return impl_->vocabulary.size(); }

std::optional<int64_t> Tokenizer::id_of(std::string_view token) const {
  const std::optional<int32_t> id = impl_->vocabulary.find(token);
  if (!id.has_value()) return std::nullopt;
  return *id;
}

std::optional<int64_t> Tokenizer::eos_id() const { return impl_->eos; }
const std::string& Tokenizer::chat_template() const { return impl_->chat_template; }
const std::vector<Tokenizer::Named>& Tokenizer::special_tokens() const {
  return impl_->special_tokens;
}
const std::string& Tokenizer::origin() const { return impl_->origin; }

}  // namespace orrery

//! The OpenAPI document, generated from the compiled .proto file and the table of routes.

use prost::Message;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet};
use serde_json::{Map, Value, json};
use unirdma_fleet::{Limit, MAX_APPLY, RULES, VRNICS, WATCHERS};

use crate::routes::ROUTES;

const PACKAGE: &str = ".unirdma.fleet.v1.";

fn reference(type_name: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{}", type_name.strip_prefix(PACKAGE).unwrap_or(type_name)) })
}

fn schema_of(field: &FieldDescriptorProto) -> Value {
    let one = match field.r#type() {
        Type::Message | Type::Enum => reference(field.type_name()),
        Type::Bool => json!({ "type": "boolean" }),
        Type::Bytes => json!({ "type": "string", "format": "byte" }),
        Type::Uint32 => json!({ "type": "integer", "minimum": 0, "maximum": u32::MAX }),
        // proto3 JSON: 64-bit numbers are text in answers. Requests may have numbers.
        Type::Uint64 => json!({ "type": "string", "format": "uint64" }),
        Type::Sint64 => json!({ "type": "string", "format": "int64" }),
        _ => json!({ "type": "string" }),
    };
    if field.label() == Label::Repeated { json!({ "type": "array", "items": one }) } else { one }
}

fn schemas(prefix: &str, message: &DescriptorProto, out: &mut Map<String, Value>) {
    let name = format!("{prefix}{}", message.name());
    let fields: Map<String, Value> = message.field.iter().map(|f| (f.json_name().to_owned(), schema_of(f))).collect();
    out.insert(name.clone(), json!({ "type": "object", "additionalProperties": false, "properties": fields }));
    for inner in &message.nested_type {
        schemas(&format!("{name}."), inner, out);
    }
    for inner in &message.enum_type {
        enumeration(&format!("{name}."), inner, out);
    }
}

fn enumeration(prefix: &str, e: &EnumDescriptorProto, out: &mut Map<String, Value>) {
    let values: Vec<&str> = e.value.iter().map(|v| v.name()).collect();
    out.insert(format!("{prefix}{}", e.name()), json!({ "type": "string", "enum": values }));
}

/// The limits of calls and tokens, for the document's description.
fn limits() -> String {
    let of = |l: &Limit| format!("{} ({} with the token of a tenant, if its groups do not say more)", l.all, l.part());
    format!(
        "A call has at most {MAX_APPLY} objects. A fleet has at most {} vRNICs and {} rules. {} may watch at a time, {} with one token. What is more than a limit is refused with the status 429, and changes nothing.",
        of(&VRNICS),
        of(&RULES),
        WATCHERS.all,
        WATCHERS.part()
    )
}

/// The document.
pub(crate) fn document() -> Value {
    let set = FileDescriptorSet::decode(unirdma_fleet::DESCRIPTORS).unwrap_or_default();
    let Some(file) = set.file.iter().find(|f| f.name().ends_with("fleet.proto")) else { return Value::Null };
    let mut components = Map::new();
    file.message_type.iter().for_each(|m| schemas("", m, &mut components));
    file.enum_type.iter().for_each(|e| enumeration("", e, &mut components));
    components.insert("Error".into(), json!({ "type": "object", "properties": { "error": { "type": "string" } } }));
    let methods = file.service.iter().filter(|s| s.name() == "Fleet").flat_map(|s| &s.method);
    let methods: Vec<_> = methods.collect();
    let mut paths: Map<String, Value> = Map::new();
    for (verb, path, call) in ROUTES {
        let Some(method) = methods.iter().find(|m| m.name() == call) else { continue };
        let request = file.message_type.iter().find(|m| Some(m.name()) == method.input_type().strip_prefix(PACKAGE));
        let in_path: Vec<&str> = path.split('/').filter_map(|p| p.strip_prefix('{')?.strip_suffix('}')).collect();
        let mut parameters: Vec<Value> = in_path
            .iter()
            .map(|p| json!({ "name": p, "in": "path", "required": true, "schema": { "type": "string" } }))
            .collect();
        let content = match method.server_streaming() {
            true => "text/event-stream",
            false => "application/json",
        };
        let mut operation = json!({
            "operationId": format!("{verb}{call}{}", in_path.len()),
            "responses": {
                "200": { "description": "Done", "content": { content: { "schema": reference(method.output_type()) } } },
                "default": { "description": "Refused; nothing was changed", "content": { "application/json": { "schema": reference(".unirdma.fleet.v1.Error") } } },
            },
        });
        if verb == "post" {
            operation["requestBody"] = json!({ "required": true, "content": { "application/json": { "schema": reference(method.input_type()) } } });
        } else {
            let fields = request.into_iter().flat_map(|m| &m.field);
            let scalar = fields.filter(|f| {
                f.label() != Label::Repeated && f.r#type() != Type::Message && !in_path.contains(&f.json_name())
            });
            parameters.extend(scalar.map(|f| json!({ "name": f.json_name(), "in": "query", "schema": schema_of(f) })));
        }
        operation["parameters"] = parameters.into();
        let entry = paths.entry(path).or_insert_with(|| json!({}));
        entry[verb] = operation;
    }
    json!({
        "openapi": "3.1.0",
        "info": { "title": "uniRDMA control centre", "version": "v1", "description": limits() },
        "security": [{ "token": [] }],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": { "token": { "type": "http", "scheme": "bearer" } },
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_has_an_address_and_every_reference_a_schema() {
        let set = FileDescriptorSet::decode(unirdma_fleet::DESCRIPTORS).unwrap();
        let services = set.file.iter().flat_map(|f| &f.service);
        let calls = services.filter(|s| s.name() == "Fleet").flat_map(|s| s.method.iter().map(|m| m.name().to_owned()));
        let routed: Vec<&str> = ROUTES.iter().map(|(_, _, call)| *call).collect();
        for call in calls {
            assert!(routed.contains(&call.as_str()), "{call} has no address");
        }
        let document = document();
        let text = document.to_string();
        let schemas = document["components"]["schemas"].as_object().unwrap();
        for part in text.split("#/components/schemas/").skip(1) {
            let name = part.split('"').next().unwrap();
            assert!(schemas.contains_key(name), "{name}");
        }
        assert!(ROUTES.iter().all(|(verb, path, _)| document["paths"][path][verb]["responses"]["200"].is_object()));
        assert_eq!(schemas["Host"]["properties"]["mayAdd"]["type"], "boolean");
    }
}

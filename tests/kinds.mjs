// What kinds of Gateway API and of Prometheus's operator complain about: a JSON list of manifests in, one of lines out.
// The validators are compiled from the projects' own types; 'make kinds' gets them into a folder, which is the argument.
import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const packages = { "gateway.networking.k8s.io": "gateway-api", "monitoring.coreos.com": "prometheus-operator" };
const folder = resolve(process.argv[2], "node_modules", "@kubernetes-models");
const lines = [];
for (const manifest of JSON.parse(readFileSync(0, "utf8"))) {
  const [group, version] = manifest.apiVersion.split("/");
  const file = resolve(folder, packages[group], group, version, `${manifest.kind}.js`);
  const { [manifest.kind]: Model } = await import(pathToFileURL(file));
  try {
    new Model(manifest).validate();
  } catch (error) {
    lines.push(`${manifest.kind} ${manifest.metadata.name}: ${error.message}`);
  }
}
process.stdout.write(JSON.stringify(lines));

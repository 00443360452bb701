package amqp

import (
	"encoding/json"
	"fmt"
)

// Definitions writes the topology in the form that RabbitMQ imports: rabbitmqctl import_definitions, the management
// page, or load_definitions in its configuration. The major version is that of the server, 3 or more: RabbitMQ 4 needs
// an argument that 3 does not understand.
func (t *Topology) Definitions(vhost string, serverMajor int) ([]byte, error) {
	const oldest = 3
	if serverMajor < oldest || vhost == "" {
		return nil, fmt.Errorf("amqp: definitions for virtual host %q of RabbitMQ %d: allowed are a virtual host with a name, and version %d or newer",
			vhost, serverMajor, oldest)
	}
	type (
		exchange struct {
			Name       string         `json:"name"`
			VHost      string         `json:"vhost"`
			Type       string         `json:"type"`
			Durable    bool           `json:"durable"`
			AutoDelete bool           `json:"auto_delete"` //nolint:tagliatelle // RabbitMQ says so
			Internal   bool           `json:"internal"`
			Arguments  map[string]any `json:"arguments"`
		}
		queue struct {
			Name       string         `json:"name"`
			VHost      string         `json:"vhost"`
			Durable    bool           `json:"durable"`
			AutoDelete bool           `json:"auto_delete"` //nolint:tagliatelle // RabbitMQ says so
			Arguments  map[string]any `json:"arguments"`
		}
		binding struct {
			Source          string         `json:"source"`
			VHost           string         `json:"vhost"`
			Destination     string         `json:"destination"`
			DestinationType string         `json:"destination_type"` //nolint:tagliatelle // RabbitMQ says so
			RoutingKey      string         `json:"routing_key"`      //nolint:tagliatelle // RabbitMQ says so
			Arguments       map[string]any `json:"arguments"`
		}
	)
	all := struct {
		Exchanges []exchange `json:"exchanges"`
		Queues    []queue    `json:"queues"`
		Bindings  []binding  `json:"bindings"`
	}{}
	none := map[string]any{}
	for _, x := range t.Exchanges {
		args := x.arguments()
		if args == nil {
			args = none
		}
		all.Exchanges = append(all.Exchanges, exchange{Name: x.Name, VHost: vhost, Type: x.Kind, Durable: true, Arguments: args})
	}
	for i := range t.Queues {
		q := &t.Queues[i]
		all.Queues = append(all.Queues, queue{Name: q.Name, VHost: vhost, Durable: true, Arguments: q.forServer(serverMajor)})
	}
	for _, b := range t.Bindings {
		all.Bindings = append(all.Bindings, binding{
			Source: b.Exchange, VHost: vhost, Destination: b.Queue, DestinationType: "queue", RoutingKey: b.Key, Arguments: none,
		})
	}
	text, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("amqp: definitions: %w", err)
	}
	return text, nil
}
